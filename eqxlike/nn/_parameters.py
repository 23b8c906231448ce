"""The initial values of a layer's parameters."""

import collections
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

    All that have no initializer are made by one compiled function: building a layer costs one
    dispatch. The first 32 layers of the same parameters are drawn one array at a time, if these are
    small, by programs that many shapes share, so that building a model compiles little. `key` may
    be `None` if each parameter has a `fill`; it is then `jax.random.key(0)` for those that have an
    initializer too.

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
    is_eager = not isinstance(key, Tracer)
    if key is not None and is_eager and _is_compiled_for_many(key, parameters):
        keys = _split(key, max(len(parameters), 4))
        # A trace may close over a key: that is an array, what is drawn from it is not.
        draw_one = _draw_one if isinstance(keys[0], Tracer) else _draw_padded
        return tuple(map(draw_one, keys, parameters))
    return _draw_at_once(key, parameters, is_eager)


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
        # Threefry's numbers depend on where in memory they stand. To count that along several axes,
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

_MAX_TIMES = 32
"""After this many layers of the same parameters, a program of their own draws them. It takes a
seventh of the time, but compiling it takes longer than drawing these layers.
"""

_times: collections.Counter[tuple[Parameter | None, ...]] = collections.Counter()


def _is_compiled_for_many(key: PRNGKeyArray, parameters: tuple[Parameter | None, ...]) -> bool:
    """Whether to draw with programs that serve for many shapes; counts the layers drawn so.

    For Threefry's partitionable numbers alone the beginning of an array is a shorter array.
    """
    is_partitionable: bool = jax.config.jax_threefry_partitionable  # pyright: ignore
    if not is_partitionable or jr.key_impl(key) != "threefry2x32":
        return False
    # Several devices, and keys of NumPy, are left to `jax.jit`.
    is_on_one = isinstance(key, jax.Array) and len(key.devices()) == 1
    if not is_on_one or not jax.sharding.get_abstract_mesh().empty:
        return False
    _times[parameters] += 1
    sizes = (math.prod(parameter.shape) for parameter in parameters if parameter)
    return _times[parameters] <= _MAX_TIMES and max(sizes) <= _MAX_PADDED


@functools.partial(jax.jit, static_argnums=1)
def _split(key: PRNGKeyArray, num: int) -> tuple[PRNGKeyArray, ...]:
    return tuple(jr.split(key, num))


@functools.partial(jax.jit, static_argnums=(2, 3))
def _draw_flat(key: PRNGKeyArray, limit: Array, size: int, dtype: jnp.dtype) -> Array:
    return uniform(key, (size,), dtype, limit)


def _draw_padded(key: PRNGKeyArray, parameter: Parameter | None) -> Array | None:
    if parameter is None or parameter.fill is not None:
        return _draw_one(key, parameter)
    shape, dtype, size = parameter.shape, parameter.dtype, math.prod(parameter.shape)
    padded = next(4**count for count in itertools.count(4) if 4**count >= size)
    place = key.sharding if key.committed else None
    # Those who disallow transfers mean their own.
    with jax.transfer_guard("allow"):
        limit = jax.device_put(np.asarray(parameter.limit, jnp.finfo(dtype).dtype), place)
        drawn = jax.device_get(_draw_flat(key, limit, padded, dtype))
        # A copy: JAX may take over memory of NumPy, and a view would keep all that was drawn.
        return jax.device_put(drawn[:size].reshape(shape).copy(), place)
