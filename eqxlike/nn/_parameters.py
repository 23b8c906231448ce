"""The initial values of a layer's parameters."""

import functools
import itertools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jaxtyping import Array, Float, PRNGKeyArray, Shaped

from .._compat import Tracer

Initializer = Callable[[PRNGKeyArray, tuple[int, ...], Any], Array]
"""`initializer(key, shape, dtype)`, as those of `jax.nn.initializers`."""


class Parameter(NamedTuple):
    """A description of one parameter of a layer, to be drawn.

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


def fan_in_limit(fan_in: int) -> float:
    """`1 / sqrt(fan_in)`; 1 where there is no input to scale by."""
    # Written so, it is the same float64 as Equinox's: `fan_in**-0.5` may differ in its last digit.
    return 1.0 if fan_in == 0 else 1 / math.sqrt(fan_in)


def draw(key: PRNGKeyArray | None, *parameters: Parameter | None) -> tuple[Any, ...]:
    """Draws the parameters of a layer, each from its own part of `key`; `None` stays `None`.

    A small array is the beginning of a larger one, which a program draws that serves for arrays of
    many shapes: building a model compiles a handful of programs. The numbers are those that
    `jax.random.uniform` draws for the shape. `key` may be `None` if each parameter has a `fill`; it
    is then `jax.random.key(0)` for those that have an initializer too.

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
    if key is None or isinstance(key, Tracer) or not _is_counted(key):
        return _draw_at_once(key, parameters)
    keys = _split(key, max(len(parameters), 4))
    # A key that a trace closes over is an array, and what is drawn from it is none.
    draw_one = _draw_one if isinstance(keys[0], Tracer) else _draw_by_count
    return tuple(map(draw_one, keys, parameters))


def draw_affine(
    shape: tuple[int, ...],
    dtype: jnp.dtype,
    use_weight: bool = True,
    use_bias: bool = True,
    weight_init: Initializer | None = None,
    bias_init: Initializer | None = None,
    key: PRNGKeyArray | None = None,
) -> tuple[Any, Any]:
    """A scale and a shift, `None` where not used: ones and zeros, unless there are initializers."""
    weight = Parameter(shape, dtype, initializer=weight_init, fill=1)
    bias = Parameter(shape, dtype, initializer=bias_init, fill=0)
    return draw(key, weight if use_weight else None, bias if use_bias else None)


@functools.partial(jax.jit, static_argnums=1)
def _draw_at_once(
    key: PRNGKeyArray | None, parameters: tuple[Parameter | None, ...]
) -> tuple[Any, ...]:
    keys = [None] * len(parameters) if key is None else jr.split(key, len(parameters))
    return tuple(map(_draw_one, keys, parameters))


def _draw_one(key: Any, parameter: Parameter | None) -> Array | None:
    if parameter is None:
        return None
    shape, dtype, limit, initializer, inputs_last, fill = parameter
    if initializer is None:
        return uniform(key, shape, dtype, limit) if fill is None else jnp.full(shape, fill, dtype)
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
    key: PRNGKeyArray, shape: tuple[int, ...], dtype: jnp.dtype, limit: float | Float[Array, ""]
) -> Shaped[Array, " ..."]:
    """Draws from U(-limit, limit); real and imaginary parts independently for a complex dtype."""
    if jnp.issubdtype(dtype, jnp.complexfloating):
        part = jnp.finfo(dtype).dtype
        real_key, imaginary_key = jr.split(key)
        real = jr.uniform(real_key, shape, part, -limit, limit)
        imaginary = jr.uniform(imaginary_key, shape, part, -limit, limit)
        return jax.lax.complex(real, imaginary)
    return jr.uniform(key, shape, dtype, -limit, limit)


# --- Arrays of many shapes, drawn by a few programs ---

_MAX_PADDED = 2**16
"""Numbers up to which an array is the beginning of a larger one, four times as large at most."""


def _is_counted(key: PRNGKeyArray) -> bool:
    """Whether what is drawn at a place depends on its number alone, and not on how many there are."""
    is_partitionable: bool = jax.config.jax_threefry_partitionable  # pyright: ignore
    is_threefry = jr.key_impl(key) == "threefry2x32"
    return is_threefry and is_partitionable and len(key.devices()) == 1


_split = jax.jit(lambda key, num: tuple(jr.split(key, num)), static_argnums=1)


def _draw_by_count(key: PRNGKeyArray, parameter: Parameter | None) -> Array | None:
    """`_draw_one` for a parameter without an initializer."""
    if parameter is None or parameter.fill is not None:
        return _draw_one(key, parameter)
    shape, dtype = parameter.shape, parameter.dtype
    limit = np.asarray(parameter.limit, jnp.finfo(dtype).dtype)
    size = math.prod(shape)
    if size > _MAX_PADDED:
        return _uniform(key, limit, size, shape, dtype)
    padded = next(count for count in itertools.count(4) if 4**count >= size)
    drawn = _uniform(key, limit, 4**padded, None, dtype)
    array = np.asarray(drawn)[:size].reshape(shape)
    return jax.device_put(array, drawn.sharding if drawn.committed else None)


@functools.partial(jax.jit, static_argnums=(2, 3, 4))
def _uniform(key: Any, limit: Any, size: int, shape: Any, dtype: Any) -> Array:
    # To count along several axes, XLA's program for shape (64, 64, 3, 3) was compiled in 2.7 times
    # the time and ran in 3.
    drawn = uniform(key, (size,), dtype, limit)
    return drawn if shape is None else drawn.reshape(shape)
