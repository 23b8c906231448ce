"""The only file that knows JAX versions or touches anything not public in JAX.

Each name says which JAX versions need it. Everything else in the package imports public JAX.
"""

import jax
import jax.core

# jax 0.10.2 to 0.12.0.1: `jax.core.Tracer` is public, documented for `isinstance` checks.
Tracer = jax.core.Tracer

# jax 0.10.2 to 0.12.0.1: what `jax.jit` returns is a class of its C++ extension that has no public
# name, so it is taken from an instance. Making one compiles nothing and starts no backend.
PjitFunction = type(jax.jit(lambda: None))
