"""What layers share when they are built: dtypes, sizes, initial values, checks of arguments."""

import functools
import math
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import jax.random as jr
from jaxtyping import Array, Float, PRNGKeyArray, Shaped

Features = int | Literal["scalar"]
"""A number of features, or `"scalar"` for arrays of shape `()`."""


def parameter_dtype(dtype: Any) -> jnp.dtype:
    """`dtype`, or for `None` JAX's default float: float64 in 64-bit mode, else float32."""
    if dtype is not None:
        return jnp.dtype(dtype)
    # A tenth of the time of `jnp.result_type(float)`, once for each layer that is built.
    return _FLOAT64 if jax.config.jax_enable_x64 else _FLOAT32  # pyright: ignore


_FLOAT32, _FLOAT64 = jnp.dtype(jnp.float32), jnp.dtype(jnp.float64)


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
    # Written so, it is the same float64 as Equinox's: `fan_in**-0.5` may differ in its last digit.
    return 1.0 if fan_in == 0 else 1 / math.sqrt(fan_in)


Initializer = Callable[[PRNGKeyArray, tuple[int, ...], Any], Array]
"""`initializer(key, shape, dtype)`, as those of `jax.nn.initializers`."""


class Parameter(NamedTuple):
    """What to draw for one parameter of a layer.

    - `shape`, `dtype`: of the array.
    - `limit`: it is uniform on (-limit, limit), unless there is an `initializer`.
    - `initializer`: what the user gave instead, or `None`.
    - `inputs_last`: whether the shape is `(outputs, inputs, *window)`, as that of weights here. An
      initializer of `jax.nn.initializers` counts its fan-in and fan-out on `(*window, inputs,
      outputs)`: it is called with that shape, and what it returns is transposed.
    """

    shape: tuple[int, ...]
    dtype: jnp.dtype
    limit: float = 1.0
    initializer: Initializer | None = None
    inputs_last: bool = False


def draw(key: PRNGKeyArray, *parameters: Parameter | None) -> tuple[Any, ...]:
    """Draws the parameters of a layer, each from its own part of `key`; `None` stays `None`.

    All that are uniform are drawn by one compiled function: building a layer costs one dispatch.

    **Raises:** `TypeError` for a dtype that is neither floating nor complex; `ValueError` if an
    initializer returns another shape or dtype.
    """
    for parameter in parameters:
        if parameter is not None and not jnp.issubdtype(parameter.dtype, jnp.inexact):
            raise TypeError(f"Parameters need a floating or complex dtype, got {parameter.dtype}.")
    if all(parameter is None or parameter.initializer is None for parameter in parameters):
        return _draw_uniform(key, parameters)
    keys = jr.split(key, len(parameters))
    return tuple(
        None if parameter is None else _draw_one(key, parameter)
        for key, parameter in zip(keys, parameters, strict=True)
    )


@functools.partial(jax.jit, static_argnums=1)
def split_key(key: PRNGKeyArray, num: int) -> tuple[PRNGKeyArray, ...]:
    """`jax.random.split` as a tuple: one dispatch, where to take a key off an array is one each."""
    return tuple(jr.split(key, num))


@functools.partial(jax.jit, static_argnums=1)
def _draw_uniform(key: PRNGKeyArray, parameters: tuple[Parameter | None, ...]) -> Any:
    keys = jr.split(key, len(parameters))
    return tuple(
        None if each is None else uniform(key, each.shape, each.dtype, each.limit)
        for key, each in zip(keys, parameters, strict=True)
    )


def _draw_one(key: PRNGKeyArray, parameter: Parameter) -> Array:
    shape, dtype, limit, initializer, inputs_last = parameter
    if initializer is None:
        return uniform(key, shape, dtype, limit)
    if inputs_last:
        outputs, inputs, *window = shape
        shape = (*window, inputs, outputs)
    array = jnp.asarray(initializer(key, shape, dtype))
    if array.shape != shape or array.dtype != dtype:
        raise ValueError(
            f"An initializer was asked for shape {shape} and dtype {dtype}, and returned shape "
            f"{array.shape} and dtype {array.dtype}."
        )
    if inputs_last:
        array = jnp.transpose(array, (len(shape) - 1, len(shape) - 2, *range(len(shape) - 2)))
    return array


def uniform(
    key: PRNGKeyArray, shape: tuple[int, ...], dtype: jnp.dtype, limit: float
) -> Shaped[Array, " ..."]:
    """Draws from U(-limit, limit); real and imaginary parts independently for a complex dtype."""
    if jnp.issubdtype(dtype, jnp.complexfloating):
        part = jnp.finfo(dtype).dtype
        real_key, imaginary_key = jr.split(key)
        real = jr.uniform(real_key, shape, part, -limit, limit)
        imaginary = jr.uniform(imaginary_key, shape, part, -limit, limit)
        return jax.lax.complex(real, imaginary)
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


def at_least_float32(dtype: jnp.dtype) -> jnp.dtype:
    """`dtype`, or float32 if that is wider: for sums, norms and softmax of half precision."""
    return wider(dtype, _FLOAT32)
