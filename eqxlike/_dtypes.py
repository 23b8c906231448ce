"""Dtypes: the default for parameters, the dtypes to compute in, and that of keys."""

import math
from typing import Any

import jax
import jax.numpy as jnp

_FLOAT32, _FLOAT64 = jnp.dtype(jnp.float32), jnp.dtype(jnp.float64)


def parameter_dtype(dtype: Any) -> jnp.dtype:
    """`dtype`, or for `None` JAX's default float: float64 in 64-bit mode, else float32."""
    if dtype is not None:
        return jnp.dtype(dtype)
    # This takes a tenth of the time of `jnp.result_type(float)`, once for each layer that is built.
    return _FLOAT64 if jax.config.jax_enable_x64 else _FLOAT32  # pyright: ignore


def is_key(x: Any) -> bool:
    """Whether `x` is an array, tracer or struct of typed keys, as `jax.random.key` makes them."""
    dtype = getattr(x, "dtype", None)
    return dtype is not None and jnp.issubdtype(dtype, jax.dtypes.prng_key)


def without_key_dtype(array: Any) -> Any:
    """The data of an array of typed keys, which a callback always gets; any other array."""
    return jax.random.key_data(array) if is_key(array) else array


def explain_key(error: Exception, key: Any, taker: str) -> None:
    """Raises an error that names the way to one key, if JAX raised `error` for a number or keys."""
    shape = getattr(key, "shape", ())
    if "PRNG key" in str(error) and shape == () and not is_key(key):
        raise TypeError(
            f"{taker} expected a key, as `jax.random.key(0)` makes it; got {key!r}."
        ) from error
    keys_shape = shape if is_key(key) else shape[:-1]
    if "accepts a single key" in str(error) and keys_shape:
        raise ValueError(
            f"{taker} expected one key; got {math.prod(keys_shape)} keys, as `jax.random.split` "
            "makes them: take one, as in `keys[0]`, or map over all with `eqxlike.filter_vmap`."
        ) from error


def wider(one: jnp.dtype, other: jnp.dtype) -> jnp.dtype:
    """The dtype of more bytes; `jnp.promote_types` would refuse where promotion is strict."""
    return max(one, other, key=lambda dtype: dtype.itemsize)


def at_least_float32(dtype: jnp.dtype) -> jnp.dtype:
    """`dtype`, or float32 if that is wider: for sums, norms and softmax of half precision."""
    return wider(dtype, _FLOAT32)
