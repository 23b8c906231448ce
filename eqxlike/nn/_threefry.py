"""`jax.random` in NumPy, so that building a model compiles few programs.

Compiling a program that splits a key or draws numbers takes 0.2 to 0.4 seconds. NumPy computes the
numbers of a small layer in a few milliseconds.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jaxtyping import PRNGKeyArray

from .._compat import Tracer
from .._dtypes import is_key


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
