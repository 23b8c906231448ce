"""What layers share: dtypes, sizes, initial values, checks of arguments."""

import math
from typing import Any, Literal

import jax
import jax.numpy as jnp
import jax.random as jr
from jaxtyping import Array, Float, PRNGKeyArray, Shaped

Features = int | Literal["scalar"]
"""A number of features, or `"scalar"` for arrays of shape `()`."""


def parameter_dtype(dtype: Any) -> jnp.dtype:
    """`dtype`, or for `None` JAX's default float: float64 in 64-bit mode, else float32."""
    return jnp.result_type(float) if dtype is None else jnp.dtype(dtype)


def feature_count(features: Features, name: str) -> int:
    """The length of the vector that stands for `features`: 1 for `"scalar"`."""
    if features == "scalar":
        return 1
    # A bool is an int to Python, never a number of features to anyone.
    if isinstance(features, bool) or not isinstance(features, int) or features < 0:
        raise ValueError(f"{name} must be a non-negative integer or 'scalar', got {features!r}.")
    return features


def check_depth(depth: int) -> None:
    """Raises `ValueError` unless `depth` is a number of hidden layers."""
    if isinstance(depth, bool) or not isinstance(depth, int) or depth < 0:
        raise ValueError(f"depth must be a non-negative integer, got {depth!r}.")


def check_scale(name: str, scale: Any) -> None:
    """Raises `ValueError` unless `scale` is one positive number, as far as can be seen."""
    if isinstance(scale, (int, float)) and not (scale > 0 and math.isfinite(scale)):
        raise ValueError(f"{name} must be positive and finite, got {scale!r}.")
    if jnp.shape(scale) != ():
        raise ValueError(f"{name} must have shape (), got shape {jnp.shape(scale)}.")


def feature_shape(features: Features) -> tuple[int, ...]:
    """The shape of one input or output with so many features: `()` for `"scalar"`."""
    return () if features == "scalar" else (features,)


def fan_in_limit(fan_in: int) -> float:
    """`1 / sqrt(fan_in)`; 1 where there is no input to scale by."""
    return 1.0 if fan_in == 0 else fan_in**-0.5


def uniform(
    key: PRNGKeyArray, shape: tuple[int, ...], dtype: jnp.dtype, limit: float
) -> Shaped[Array, " ..."]:
    """Draws from U(-limit, limit); real and imaginary parts independently for a complex dtype.

    **Raises:** `TypeError` for a dtype that is neither floating nor complex.
    """
    if jnp.issubdtype(dtype, jnp.complexfloating):
        part = jnp.finfo(dtype).dtype
        real_key, imaginary_key = jr.split(key)
        real = jr.uniform(real_key, shape, part, -limit, limit)
        imaginary = jr.uniform(imaginary_key, shape, part, -limit, limit)
        return jax.lax.complex(real, imaginary)
    if not jnp.issubdtype(dtype, jnp.floating):
        raise TypeError(f"Parameters need a floating or complex dtype, got {dtype}.")
    return jr.uniform(key, shape, dtype, -limit, limit)


def log_softplus(rho: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """`log(softplus(rho))`, finite with a finite gradient where `softplus(rho)` underflows to 0."""
    # Below -40 log(softplus(rho)) = rho - exp(rho) / 2 + ... is rho to the last digit of a float64.
    # The inner `where` keeps the 0 / 0 of an underflow out of the gradient.
    is_tiny = rho < -40
    return jnp.where(is_tiny, rho, jnp.log(jax.nn.softplus(jnp.where(is_tiny, 0, rho))))


def wider(one: jnp.dtype, other: jnp.dtype) -> jnp.dtype:
    """The dtype of more bytes; `jnp.promote_types` refuses where promotion is to be strict."""
    return max(one, other, key=lambda dtype: dtype.itemsize)


def check_input(layer: str, x: Any, features: Features) -> None:
    """Raises `ValueError` unless `x` is one unbatched input with so many features."""
    expected, shape = feature_shape(features), jnp.shape(x)
    if shape == expected:
        return
    message = f"{layer} expected x of shape {expected}, got shape {shape}."
    if len(shape) > len(expected) and shape[len(shape) - len(expected) :] == expected:
        message += " It takes one example at a time: for a batch write `jax.vmap(layer)(x)`."
    raise ValueError(message)
