"""Models to differentiate, in JAX, NumPyro and PyTorch."""
