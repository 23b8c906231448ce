"""The random numbers of layers: initial parameters, and `jax.random` in NumPy.

Compiling a program that splits a key or draws numbers takes 0.2 to 0.4 seconds. NumPy computes the
numbers of a small layer in a few milliseconds.
"""

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
from .._dtypes import is_key, parameter_dtype

Initializer = Callable[[PRNGKeyArray, tuple[int, ...], Any], Array]
"""`initializer(key, shape, dtype)`, as in `jax.nn.initializers`."""


class Parameter(NamedTuple):
    """The shape, dtype and distribution of one initial parameter.

    The first of these fields that is not `None` determines the values:

    - `initializer`: an initializer from the user.
    - `fill`: a constant.
    - `limit`: uniform on (-limit, limit).

    `is_outputs_first` is `True` if the shape is `(outputs, inputs, *window)`, as for the weights of
    this library. `jax.nn.initializers` compute fan-in and fan-out from `(*window, inputs,
    outputs)`. The initializer is therefore called with this second shape, and its result is
    transposed.
    """

    shape: tuple[int, ...]
    dtype: jnp.dtype
    limit: float = 1.0
    initializer: Initializer | None = None
    is_outputs_first: bool = False
    fill: float | None = None


def fan_in_limit(fan_in: int) -> float:
    """`1 / sqrt(fan_in)`, or 1 if `fan_in` is 0."""
    # Equal to Equinox's value in all bits; `fan_in**-0.5` may differ in the last bit.
    return 1.0 if fan_in == 0 else 1 / math.sqrt(fan_in)


def draw(key: PRNGKeyArray | None, *parameters: Parameter | None) -> tuple[Any, ...]:
    """Draws the parameters of a layer, each with its own part of `key`. A parameter `None` stays
    `None`.

    Without initializers, one compiled function draws all parameters, so that a layer costs one
    dispatch. For the first 64 layers with equal parameters, NumPy draws small parameters. This
    avoids most compilation when a model is built. `key` may be `None` if each parameter has a
    `fill`; initializers then get `jax.random.key(0)`.

    Raises `TypeError` for a dtype that is neither floating nor complex, and `ValueError` if an
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
    if _count_and_choose_host(parameters):
        if is_filled:
            return tuple(_draw_on_host(None, parameter, None) for parameter in parameters)
        if (data := data_on_host(key)) is not None:
            draw_one = functools.partial(_draw_on_host, place=place_of(key))
            return tuple(map(draw_one, split_data(data, len(parameters)), parameters))
    return _draw_at_once(key, parameters, not isinstance(key, Tracer))


def draw_linear(
    key: PRNGKeyArray,
    shape: tuple[int, ...],
    dtype: Any,
    use_bias: bool,
    weight_init: Initializer | None,
    bias_init: Initializer | None,
) -> tuple[Array, Array | None]:
    """Draws a weight of shape `(outputs, inputs, *window)`, and a bias of shape `(outputs, 1, ...,
    1)` with one axis less.
    """
    dtype, limit = parameter_dtype(dtype), fan_in_limit(math.prod(shape[1:]))
    bias_shape = (shape[0],) + (1,) * (len(shape) - 2)
    return draw(
        key,
        Parameter(shape, dtype, limit, weight_init, is_outputs_first=True),
        Parameter(bias_shape, dtype, limit, bias_init) if use_bias else None,
    )


def draw_affine(
    shape: tuple[int, ...],
    dtype: Any,
    use_weight: bool = True,
    use_bias: bool = True,
    weight_init: Initializer | None = None,
    bias_init: Initializer | None = None,
    key: PRNGKeyArray | None = None,
) -> tuple[Any, Any]:
    """Returns a scale and a shift: ones and zeros, unless initializers are given. An unused scale
    or shift is `None`.
    """
    dtype = parameter_dtype(dtype)
    weight = Parameter(shape, dtype, initializer=weight_init, fill=1)
    bias = Parameter(shape, dtype, initializer=bias_init, fill=0)
    return draw(key, weight if use_weight else None, bias if use_bias else None)


@functools.partial(jax.jit, static_argnums=(1, 2))
def _draw_at_once(
    key: PRNGKeyArray | None, parameters: tuple[Parameter | None, ...], is_eager: bool
) -> tuple[Any, ...]:
    """Like `draw`, for parameters without an `initializer`.

    `is_eager` is `False` if the call is inside a larger program.
    """
    keys = [None] * len(parameters) if key is None else jr.split(key, len(parameters))
    drawn: list[Any] = []
    for key, parameter in zip(keys, parameters, strict=True):
        if is_eager and drawn and key is not None:
            # This barrier makes each draw depend on the previous draw. Without it, XLA draws the
            # arrays on several threads of a CPU. On jax 0.12 the synchronisation of the threads
            # costs more than drawing a small array: shapes (64, 64) and (64,) took 2.3 times as
            # long.
            drawn[-1], key = jax.lax.optimization_barrier((drawn[-1], key))
            # The key reuse checker counts the barrier as a use of the key.
            key = jr.clone(key)
        drawn.append(_draw_one(key, parameter, is_eager))
    return tuple(drawn)


def _draw_one(key: Any, parameter: Parameter | None, is_eager: bool = False) -> Array | None:
    if parameter is None:
        return None
    shape, dtype, limit, initializer, is_outputs_first, fill = parameter
    if initializer is None and fill is not None:
        return jnp.full(shape, fill, dtype)
    if initializer is None:
        # Threefry's counter is the flat index of an entry, so this function draws a flat array and
        # reshapes it. If XLA computes the flat index from several axes, the program for shape (64,
        # 64, 3, 3) takes 2.7 times as long to compile and 3 times as long to run. In a larger
        # program the array may be sharded along any axis, so it is drawn in its own shape.
        if is_eager and jr.key_impl(key) == THREEFRY:
            return uniform(key, (math.prod(shape),), dtype, limit).reshape(shape)
        return uniform(key, shape, dtype, limit)
    if is_outputs_first:
        outputs, inputs, *window = shape
        shape = (*window, inputs, outputs)
    array = jnp.asarray(initializer(key, shape, dtype))
    if array.shape != shape or array.dtype != dtype:
        raise ValueError(
            f"An initializer was called with shape {shape} and dtype {dtype}, but returned shape "
            f"{array.shape} and dtype {array.dtype}."
        )
    if is_outputs_first:
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
    """`jax.random.normal`, computed by NumPy for small arrays."""
    size, is_real = math.prod(shape), jnp.issubdtype(dtype, jnp.floating)
    if size > _MAX_SIZE or not is_real or (data := data_on_host(key)) is None:
        return jr.normal(key, shape, dtype)
    with jax.transfer_guard("allow"):
        drawn = _draw_by(_scale_to_normal, data, size, dtype, place_of(key))
        return jax.device_put(drawn.reshape(shape), place_of(key))


# --- Small arrays, drawn by NumPy ---

_MAX_SIZE = 2**16
"""The largest number of entries that NumPy draws."""

_MAX_HOST_DRAWS = 64
"""After this many layers with equal parameters, a compiled program draws them. The program is
faster, but compiling it takes about as long as drawing this many layers with NumPy.
"""

_num_draws: collections.Counter[tuple[Parameter | None, ...]] = collections.Counter()


def _count_and_choose_host(parameters: tuple[Parameter | None, ...]) -> bool:
    """Counts one more layer with equal parameters. Returns whether NumPy draws its parameters."""
    if not jax.sharding.get_abstract_mesh().empty:
        return False
    _num_draws[parameters] += 1
    present = [parameter for parameter in parameters if parameter]
    return _num_draws[parameters] <= _MAX_HOST_DRAWS and all(
        math.prod(each.shape) <= _MAX_SIZE and jnp.finfo(each.dtype).bits >= 16 for each in present
    )


def _draw_on_host(data: Any, parameter: Parameter | None, place: Any) -> Array | None:
    if parameter is None:
        return None
    shape, dtype, size = parameter.shape, parameter.dtype, math.prod(parameter.shape)
    # Allows this transfer, because a user's transfer guard is meant for the user's own transfers.
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
    """Applies `program` to draws from U(0, 1), of a real dtype.

    `program` is the last step of a function of `jax.random`. XLA and not NumPy runs this step,
    because XLA decides whether a product and a sum are rounded once or twice. All sizes share one
    compiled program.
    """
    padded = np.zeros(_MAX_SIZE, dtype)
    padded[:size] = uniform_on_host(data, size, dtype)
    # Returns a copy, because JAX may adopt NumPy's memory, and a view would keep the whole padded
    # array alive.
    return jax.device_get(program(*jax.device_put((padded, *numbers), place)))[:size].copy()


@jax.jit
def _scale(drawn: Array, limit: Array) -> Array:
    # The same operations as in `jax.random.uniform`, so that the results are equal to the last bit.
    return jnp.maximum(-limit, drawn * (limit - -limit) + -limit)


@jax.jit
def _scale_to_normal(drawn: Array) -> Array:
    least = np.nextafter(np.asarray(-1, drawn.dtype), np.asarray(0, drawn.dtype))
    uniform = jnp.maximum(least, drawn * (1 - least) + least)
    return jax.lax.erf_inv(uniform) * np.asarray(np.sqrt(2), drawn.dtype)


# --- `jax.random` in NumPy ---


def split_key(key: PRNGKeyArray, num: int) -> tuple[PRNGKeyArray, ...]:
    """`jax.random.split` as a tuple of keys. Indexing an array of keys costs one dispatch for each
    key.
    """
    data = data_on_host(key)
    if data is None:
        return split_in_program(key, num)
    with jax.transfer_guard("allow"):
        keys = jax.device_put(list(split_data(data, num)), place_of(key))
    return tuple(jr.wrap_key_data(each, impl=THREEFRY) if is_key(key) else each for each in keys)


@functools.partial(jax.jit, static_argnums=1)
def split_in_program(key: PRNGKeyArray, num: int) -> tuple[PRNGKeyArray, ...]:
    """`split_key` as one compiled program. After compilation, this program is faster."""
    return tuple(jr.split(key, num))


THREEFRY = "threefry2x32"


def data_on_host(key: Any) -> np.ndarray | None:
    """The two numbers of a Threefry key; `None` if JAX must process the key.

    The result is `None` for other key types, NumPy arrays, tracers, batches of keys, keys on
    several devices, and inside a mesh context.
    """
    is_partitionable: bool = jax.config.jax_threefry_partitionable  # pyright: ignore
    if not isinstance(key, jax.Array) or isinstance(key, Tracer) or not is_partitionable:
        return None
    if jr.key_impl(key) != THREEFRY or len(key.devices()) > 1:
        return None
    data = jr.key_data(key)
    # In a trace, a closed-over key is an array, but its `key_data` is a tracer.
    is_one = not isinstance(data, Tracer) and data.shape == (2,)
    if not is_one or not jax.sharding.get_abstract_mesh().empty:
        return None
    if jax.config.jax_debug_key_reuse:  # pyright: ignore
        # JAX's key reuse checker only sees operations of JAX. This JAX operation marks the key as
        # used.
        jr.split(key)
    # Allows this transfer, because a user's transfer guard is meant for the user's own transfers.
    with jax.transfer_guard("allow"):
        return jax.device_get(data)


def place_of(array: Any) -> Any:
    """The sharding of a committed array, for `jax.device_put`; `None` if it is not committed."""
    return array.sharding if array.committed else None


def split_data(data: np.ndarray, num: int) -> np.ndarray:
    """The key data of `jax.random.split(key, num)`, of shape `(num, 2)`."""
    return np.stack(_threefry(data, num), axis=-1)


def uniform_on_host(data: np.ndarray, size: int, dtype: Any) -> np.ndarray:
    """Computes `jax.random.uniform(key, (size,), dtype)` with NumPy, for a real dtype."""
    info, one = jnp.finfo(dtype), np.ones((), dtype)
    unsigned = np.dtype(f"uint{info.bits}")
    # As in JAX, dtypes with fewer than 8 mantissa bits are drawn from bytes.
    width = 8 if info.nmant < 8 else info.bits
    high, low = _threefry(data, size)
    bits = high.astype(unsigned) << 32 | low if width == 64 else high ^ low
    bits = bits.astype(f"uint{width}").astype(unsigned)
    # The random bits become the mantissa of a number in [1, 2).
    return (bits >> (width - info.nmant) | one.view(unsigned)).view(dtype) - one


_ROTATIONS = (13, 15, 26, 6), (17, 29, 16, 24)


def _threefry(data: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray]:
    """The Threefry numbers of the counters 0 to `size - 1` for the key `data`."""
    counts = np.arange(size, dtype=np.uint32)
    return threefry(data[0], data[1], np.zeros_like(counts), counts)


def threefry(key0: Any, key1: Any, a: Any, b: Any) -> tuple[Any, Any]:
    """Threefry-2x32 with 20 rounds, for NumPy or JAX arrays: encrypts the counters `a` and `b`.

    Salmon, Moraes, Dror & Shaw (2011), "Parallel Random Numbers: As Easy as 1, 2, 3".
    """
    keys = key0, key1, key0 ^ key1 ^ np.uint32(0x1BD11BDA)
    a, b = a + keys[0], b + keys[1]
    for group in range(5):
        for rotation in _ROTATIONS[group % 2]:
            a = a + b
            b = (b << rotation | b >> (32 - rotation)) ^ a
        a = a + keys[(group + 1) % 3]
        b = b + keys[(group + 2) % 3] + np.uint32(group + 1)
    return a, b
