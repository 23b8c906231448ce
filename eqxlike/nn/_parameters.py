"""The initial values of a layer's parameters."""

import collections
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jaxtyping import Array, Float, PRNGKeyArray, Shaped

from .._compat import Tracer
from ._threefry import THREEFRY, data_on_host, place_of, split_data, uniform_on_host

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
    dispatch. The first 64 layers of the same parameters are drawn by NumPy, if these are small, so
    that building a model compiles little. `key` may be `None` if each parameter has a `fill`; it is
    then `jax.random.key(0)` for those that have an initializer too.

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
    is_filled = all(parameter.fill is not None for parameter in present)
    if is_filled:
        key = None
    if _is_small_and_rare(parameters):
        if is_filled:
            return tuple(_draw_on_host(None, parameter, None) for parameter in parameters)
        if (data := data_on_host(key)) is not None:
            draw_one = functools.partial(_draw_on_host, place=place_of(key))
            return tuple(map(draw_one, split_data(data, len(parameters)), parameters))
    return _draw_at_once(key, parameters, not isinstance(key, Tracer))


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
        if is_eager and jr.key_impl(key) == THREEFRY:
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


def normal(key: PRNGKeyArray, shape: tuple[int, ...], dtype: Any) -> Array:
    """`jax.random.normal`, by NumPy for a small array."""
    size, is_real = math.prod(shape), jnp.issubdtype(dtype, jnp.floating)
    if size > _MAX_SIZE or not is_real or (data := data_on_host(key)) is None:
        return jr.normal(key, shape, dtype)
    with jax.transfer_guard("allow"):
        drawn = _draw_by(_scale_to_normal, data, size, dtype, place_of(key))
        return jax.device_put(drawn.reshape(shape), place_of(key))


# --- Small arrays, drawn by NumPy ---

_MAX_SIZE = 2**16
"""Numbers up to which an array is small."""

_MAX_TIMES = 64
"""After this many layers of the same parameters, a program of their own draws them. It takes
less time, but compiling it takes about as long as drawing these layers.
"""

_times: collections.Counter[tuple[Parameter | None, ...]] = collections.Counter()


def _is_small_and_rare(parameters: tuple[Parameter | None, ...]) -> bool:
    """Whether NumPy may draw; counts the layers of the same parameters."""
    if not jax.sharding.get_abstract_mesh().empty:
        return False
    _times[parameters] += 1
    present = [parameter for parameter in parameters if parameter]
    return _times[parameters] <= _MAX_TIMES and all(
        math.prod(each.shape) <= _MAX_SIZE and jnp.finfo(each.dtype).bits >= 16 for each in present
    )


def _draw_on_host(data: Any, parameter: Parameter | None, place: Any) -> Array | None:
    if parameter is None:
        return None
    shape, dtype, size = parameter.shape, parameter.dtype, math.prod(parameter.shape)
    # Those who disallow transfers mean their own.
    with jax.transfer_guard("allow"):
        if parameter.fill is not None:
            return jax.device_put(np.broadcast_to(np.asarray(parameter.fill, dtype), shape), place)

        def draw_part(dtype: Any, data: np.ndarray) -> np.ndarray:
            return _draw_by(_scale, data, size, dtype, place, np.asarray(parameter.limit, dtype))

        if jnp.issubdtype(dtype, jnp.complexfloating):
            drawn: Any = np.empty(size, dtype)
            keys = split_data(data, 2)
            drawn.real, drawn.imag = (draw_part(drawn.real.dtype, each) for each in keys)
        else:
            drawn = draw_part(dtype, data)
        return jax.device_put(drawn.reshape(shape), place)


def _draw_by(
    program: Callable, data: np.ndarray, size: int, dtype: Any, place: Any, *numbers: np.ndarray
) -> np.ndarray:
    """What `program` makes of draws from U(0, 1), of a real dtype.

    It computes what `jax.random` does last, and for all sizes: whether a product and a sum are
    rounded once or twice is XLA's choice.
    """
    padded = np.zeros(_MAX_SIZE, dtype)
    padded[:size] = uniform_on_host(data, size, dtype)
    # A copy: JAX may take over memory of NumPy, and a view would keep all that was drawn.
    return jax.device_get(program(*jax.device_put((padded, *numbers), place)))[:size].copy()


@jax.jit
def _scale(drawn: Array, limit: Array) -> Array:
    return jnp.maximum(-limit, drawn * (limit - -limit) + -limit)


@jax.jit
def _scale_to_normal(drawn: Array) -> Array:
    least = np.nextafter(np.asarray(-1, drawn.dtype), np.asarray(0, drawn.dtype))
    uniform = jnp.maximum(least, drawn * (1 - least) + least)
    return jax.lax.erf_inv(uniform) * np.asarray(np.sqrt(2), drawn.dtype)
