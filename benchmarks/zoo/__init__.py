"""Models to differentiate: what they are, in JAX, in NumPyro and in PyTorch."""
