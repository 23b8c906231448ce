"""Arrays by NumPy, which compiles nothing for each shape."""

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np


def normal(key: jax.Array, shape: tuple[int, ...], dtype: jnp.dtype = jnp.float32) -> jax.Array:
    """Normally distributed, drawn by `key`."""
    with jax.ensure_compile_time_eval():
        generator = np.random.default_rng(np.asarray(jr.key_data(key)))
    drawn = generator.normal(size=shape)
    if jnp.issubdtype(dtype, jnp.complexfloating):
        drawn = drawn + 1j * generator.normal(size=shape)
    return jnp.asarray(np.asarray(drawn).astype(dtype))
