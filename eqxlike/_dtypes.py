"""Dtypes: the default for parameters, dtypes to compute in, and the dtype of PRNG keys."""

import math
from typing import Any

import jax
import jax.numpy as jnp

_FLOAT32, _FLOAT64 = jnp.dtype(jnp.float32), jnp.dtype(jnp.float64)


def parameter_dtype(dtype: Any) -> jnp.dtype:
    """Returns `dtype`, or JAX's default if `dtype` is `None`.

    The default is float64 in 64-bit mode, otherwise float32.
    """
    if dtype is not None:
        return jnp.dtype(dtype)
    # This is ten times faster than `jnp.result_type(float)`, which matters because each new layer
    # calls this function.
    return _FLOAT64 if jax.config.jax_enable_x64 else _FLOAT32  # pyright: ignore


def is_key(x: Any) -> bool:
    """Whether the dtype of `x` is a typed key dtype, as for `jax.random.key(0)`.

    `x` may be an array, a tracer or a `jax.ShapeDtypeStruct`. For other objects, returns `False`.
    """
    dtype = getattr(x, "dtype", None)
    return dtype is not None and jnp.issubdtype(dtype, jax.dtypes.prng_key)


def without_key_dtype(array: Any) -> Any:
    """Converts typed keys to the key data that a callback receives; keeps all other arrays."""
    return jax.random.key_data(array) if is_key(array) else array


def explain_key(error: Exception, key: Any, taker: str) -> None:
    """Raises a clearer error if JAX raised `error` because `key` is not a single key."""
    shape = getattr(key, "shape", ())
    if "PRNG key" in str(error) and shape == () and not is_key(key):
        raise TypeError(
            f"{taker} expected a key, as `jax.random.key(0)` makes it; got {key!r}."
        ) from error
    keys_shape = shape if is_key(key) else shape[:-1]
    if "accepts a single key" in str(error) and keys_shape:
        raise ValueError(
            f"{taker} expected one key; got {math.prod(keys_shape)} keys, as from "
            "`jax.random.split`: select one with `keys[0]`, or map over all of them with "
            "`eqxlike.filter_vmap`."
        ) from error


def wider(one: jnp.dtype, other: jnp.dtype) -> jnp.dtype:
    """The dtype with more bytes. Unlike `jnp.promote_types`, it works in strict promotion mode."""
    return max(one, other, key=lambda dtype: dtype.itemsize)


def at_least_float32(dtype: jnp.dtype) -> jnp.dtype:
    """The wider of `dtype` and float32. Sums, norms and softmax are computed in this dtype."""
    return wider(dtype, _FLOAT32)
