"""What layers share when they are built: dtypes, sizes, initial values, checks of arguments."""

import functools
import math
import numbers
import operator
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import jax.random as jr
from jaxtyping import Array, Float, PRNGKeyArray, Shaped

from ..._compat import Tracer

Features = int | Literal["scalar"]
"""A number of features, or `"scalar"` for arrays of shape `()`."""


def parameter_dtype(dtype: Any) -> jnp.dtype:
    """`dtype`, or for `None` JAX's default float: float64 in 64-bit mode, else float32."""
    if dtype is not None:
        return jnp.dtype(dtype)
    # A tenth of the time of `jnp.result_type(float)`, once for each layer that is built.
    return _FLOAT64 if jax.config.jax_enable_x64 else _FLOAT32  # pyright: ignore


_FLOAT32, _FLOAT64 = jnp.dtype(jnp.float32), jnp.dtype(jnp.float64)


def integer(value: Any) -> int | None:
    """`value` as an `int` of Python, so that a layer is the same whoever's integer it was given;
    `None` if it is none.
    """
    # A bool is an int to Python, never a size to anyone.
    if isinstance(value, bool):
        return None
    try:
        return operator.index(value)
    except TypeError:
        return None


def whole_number(value: Any, name: str, least: int = 1) -> int:
    """`value` as an `int`.

    **Raises:** `ValueError` unless it is an integer of at least `least`.
    """
    number = integer(value)
    if number is None or number < least:
        raise ValueError(f"{name} must be an integer of at least {least}, got {value!r}.")
    return number


def real_number(value: Any, name: str) -> float:
    """`value` as a `float` of Python.

    **Raises:** `TypeError` unless it is a real number.
    """
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name} must be a number, got {value!r}.")
    return float(value)


def number_of_features(value: Any, name: str) -> Features:
    """`value` as an `int`, or `"scalar"`.

    **Raises:** `ValueError` unless it is an integer of at least 0, or that word.
    """
    if isinstance(value, str) and value == "scalar":
        return "scalar"
    number = integer(value)
    if number is None or number < 0:
        raise ValueError(f"{name} must be an integer of at least 0 or 'scalar', got {value!r}.")
    return number


def feature_count(features: Features) -> int:
    """The length of the vector that stands for `features`: 1 for `"scalar"`."""
    return 1 if features == "scalar" else features


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
    - `limit`: it is uniform on (-limit, limit), unless there is a `fill` or an `initializer`.
    - `initializer`: what the user gave instead, or `None`.
    - `inputs_last`: whether the shape is `(outputs, inputs, *window)`, as that of weights here. An
      initializer of `jax.nn.initializers` counts its fan-in and fan-out on `(*window, inputs,
      outputs)`: it is called with that shape, and what it returns is transposed.
    - `fill`: what all its entries are, unless there is an `initializer`; nothing is drawn then.
    """

    shape: tuple[int, ...]
    dtype: jnp.dtype
    limit: float = 1.0
    initializer: Initializer | None = None
    inputs_last: bool = False
    fill: float | None = None


def draw(key: PRNGKeyArray | None, *parameters: Parameter | None) -> tuple[Any, ...]:
    """Draws the parameters of a layer, each from its own part of `key`; `None` stays `None`.

    All that have no initializer are made by one compiled function: building a layer costs one
    dispatch. `key` may be `None` if each parameter has a `fill`; it is then `jax.random.key(0)` for
    those that have an initializer too.

    **Raises:** `TypeError` for a dtype that is neither floating nor complex; `ValueError` if an
    initializer returns another shape or dtype.
    """
    present = [parameter for parameter in parameters if parameter is not None]
    for parameter in present:
        if not jnp.issubdtype(parameter.dtype, jnp.inexact):
            raise TypeError(f"Parameters need a floating or complex dtype, got {parameter.dtype}.")
    if any(parameter.initializer is not None for parameter in present):
        keys = jr.split(jr.key(0) if key is None else key, len(parameters))
        return tuple(map(_draw_one, keys, parameters))
    if all(parameter.fill is not None for parameter in present):
        key = None
    return _draw_at_once(key, parameters, not isinstance(key, Tracer))


@functools.partial(jax.jit, static_argnums=1)
def split_key(key: PRNGKeyArray, num: int) -> tuple[PRNGKeyArray, ...]:
    """`jax.random.split` as a tuple: one dispatch, where to take a key off an array is one each."""
    return tuple(jr.split(key, num))


def as_data(keys: PRNGKeyArray | None) -> tuple[Any, Callable[[Any], Any]]:
    """Keys as the numbers that they are made of, and the function that makes keys of them again.

    For what a `scan` walks along: of keys that a `vmap` around it has moved into place, JAX's check
    for keys that are used twice says that they are used up.
    """
    if keys is None or not jnp.issubdtype(keys.dtype, jax.dtypes.prng_key):
        return keys, lambda data: data
    implementation = jr.key_impl(keys)
    return jr.key_data(keys), lambda data: jr.wrap_key_data(data, impl=implementation)


@functools.partial(jax.jit, static_argnums=(1, 2))
def _draw_at_once(
    key: PRNGKeyArray | None, parameters: tuple[Parameter | None, ...], is_eager: bool
) -> tuple[Any, ...]:
    """`draw` without initializers; `is_eager` says whether this is all that the program does."""
    keys = [None] * len(parameters) if key is None else jr.split(key, len(parameters))
    drawn: list[Any] = []
    for key, parameter in zip(keys, parameters, strict=True):
        if is_eager and drawn and key is not None:
            # One array after another. Side by side, as XLA has it on a CPU, they are drawn by
            # several threads, whose waiting on jax 0.12 costs more than to draw a small array: 2.3
            # times the time for shapes (64, 64) and (64,).
            drawn[-1], key = jax.lax.optimization_barrier((drawn[-1], key))
            # To the check for keys that are used twice, the barrier was the first use of this one.
            key = jr.clone(key)
        drawn.append(_draw_one(key, parameter, is_eager))
    return tuple(drawn)


def _draw_one(key: Any, parameter: Parameter | None, is_eager: bool = False) -> Array | None:
    if parameter is None:
        return None
    shape, dtype, limit, initializer, inputs_last, fill = parameter
    if initializer is None and fill is not None:
        return jnp.full(shape, fill, dtype)
    if initializer is None:
        # Threefry's numbers hang on where in memory they stand. To count that along several axes,
        # XLA's program for shape (64, 64, 3, 3) was compiled in 2.7 times the time and ran in 3.
        # In a larger program the array may be sharded, by any of its axes.
        if is_eager and jr.key_impl(key) == "threefry2x32":
            return uniform(key, (math.prod(shape),), dtype, limit).reshape(shape)
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
