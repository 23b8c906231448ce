"""One leaf of a pytree in a file: a record in NumPy's `.npy` format, of which pickles are no part.

The record says shape and dtype of a number or an array; of which type it was in Python, and which
implementation a PRNG key was for, says `like` at reading. As Equinox does it, so that either
library reads the files of the other.
"""

from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from .._compat import Tracer


class Writable(Protocol):
    """What a leaf is written to: a file open in binary mode, or what has its `write`."""

    def write(self, data: Any, /) -> Any: ...


class Readable(Protocol):
    """What a leaf is read from: a file open in binary mode, or what has its `read`."""

    def read(self, size: int = -1, /) -> bytes: ...


def default_serialise_filter_spec(f: Writable, x: Any) -> None:
    """Writes one leaf: JAX and NumPy arrays, PRNG keys, NumPy scalars and Python numbers.

    Leaves of other types are skipped: functions, strings, and `jax.Ref`s, whose values are no part
    of the tree.

    **Arguments:**

    - `f`: a file open for writing in binary mode.
    - `x`: the leaf, of any type.

    **Raises:** `ValueError` for a Python number of more than 64 bits and for an array of Python
    objects, which NumPy could only pickle.

    !!! example

        Wrap it to treat some leaves differently, here to write no JAX arrays.

        >>> import eqxlike as eqx, io, jax, jax.numpy as jnp
        >>> def spec(file, leaf):
        ...     if not isinstance(leaf, jax.Array):
        ...         eqx.default_serialise_filter_spec(file, leaf)
        >>> file = io.BytesIO()
        >>> eqx.tree_serialise_leaves(file, (jnp.ones(1000), 2.0), filter_spec=spec)
        >>> len(file.getvalue())
        136
    """
    if isinstance(x, jax.Array) and _is_key(x):
        x = jax.random.key_data(x)
    if not isinstance(x, _SAVED):
        return
    record = np.asarray(x)
    if record.dtype.hasobject:
        raise ValueError(
            f"NumPy would pickle this {type(x).__name__}, and whoever reads pickles runs the code "
            "in them: only numbers of up to 64 bits and arrays of numbers can be written"
        )
    if record.dtype.isbuiltin == _ADDED_TO_NUMPY and record.dtype.kind != "V":
        # NumPy would write a description of the dtype that it does not understand at reading.
        record = record.view(f"V{record.itemsize}")
    np.save(f, record, allow_pickle=False)


def default_deserialise_filter_spec(f: Readable, x: Any) -> Any:
    """Reads one leaf that `default_serialise_filter_spec` has written.

    **Arguments:**

    - `f`: a file open for reading in binary mode.
    - `x`: a leaf of the type to return; in the place of a JAX array a `jax.ShapeDtypeStruct` will
        do. Leaves of types that are not written are returned as they are.

    **Returns:** the leaf. An array has shape and dtype of the file, whatever those of `x`; but a
    64-bit number becomes a JAX array of 32 bits unless `jax_enable_x64` is set. It lies where `x`
    was put, if `x` was put somewhere on purpose.

    **Raises:** `EOFError` if the file has no further record; `ValueError` if what follows is no
    record, is cut off, holds pickled objects, or has a value that the type of `x` cannot have;
    `TypeError` if the file is not open in binary mode.

    !!! example

        Wrap it to treat some leaves differently, here to read a model of other precision.

        >>> import eqxlike as eqx, io, jax.numpy as jnp
        >>> def spec(file, leaf):
        ...     return eqx.default_deserialise_filter_spec(file, leaf).astype(leaf.dtype)
        >>> file = io.BytesIO()
        >>> eqx.tree_serialise_leaves(file, jnp.ones(2, jnp.float16))
        >>> _ = file.seek(0)
        >>> eqx.tree_deserialise_leaves(file, jnp.zeros(2), filter_spec=spec)
        Array([1., 1.], dtype=float32)
    """
    if isinstance(x, jax.Array | jax.ShapeDtypeStruct):
        record = _read_record(f)
        array = _as_key(record, x) if _is_key(x) else _as_jax_array(record, x.dtype)
        sharding = _sharding_on_purpose(x)
        return array if sharding is None else jax.device_put(array, sharding)
    if isinstance(x, np.ndarray):
        return _with_added_dtype(_read_record(f), x.dtype)
    if isinstance(x, np.generic):
        return _with_added_dtype(_read_record(f), x.dtype)[()]
    for kind, dtype in _PYTHON_NUMBERS.items():
        if isinstance(x, kind):
            return _as_python_number(_read_record(f), type(x), dtype)
    return x


_SAVED = (jax.Array, np.ndarray, np.generic, bool, int, float, complex)

_PYTHON_NUMBERS: dict[type, Any] = {
    bool: np.bool_,
    int: np.int64,
    float: np.float64,
    complex: np.complex128,
}

# What `dtype.isbuiltin` says of a dtype that a package has registered with NumPy, such as bfloat16.
_ADDED_TO_NUMPY = 2


class _Resumed:
    """A file of which the first byte has been read already."""

    def __init__(self, first: bytes, file: Readable):
        self.first = first
        self.file = file

    def read(self, size: int) -> bytes:
        first, self.first = self.first[:size], self.first[size:]
        return first + self.file.read(size - len(first))


def _read_record(f: Readable) -> np.ndarray:
    first = f.read(1)
    if not isinstance(first, bytes):
        raise TypeError("the file is not open in binary mode: use `open(path, 'rb')`")
    if not first:
        raise EOFError("the file ends before this leaf")
    return np.lib.format.read_array(_Resumed(first, f), allow_pickle=False)  # pyright: ignore


def _with_added_dtype(record: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """The numbers in `record` if they are of a dtype like bfloat16, of which NumPy writes no more
    than the number of bytes.
    """
    is_raw = record.dtype.kind == "V" and record.dtype.names is None
    if is_raw and dtype.isbuiltin == _ADDED_TO_NUMPY and dtype.itemsize == record.itemsize:
        return record.view(dtype)
    return record


def _as_jax_array(record: np.ndarray, dtype: np.dtype) -> jax.Array:
    # If the dtypes differ, whoever called may want to cast: two bytes are most likely a bfloat16.
    record = _with_added_dtype(record, dtype)
    record = _with_added_dtype(record, jnp.dtype(jnp.bfloat16))
    if not jnp.issubdtype(record.dtype, np.number) and record.dtype != np.bool_:
        raise ValueError(f"the file has values of dtype {record.dtype}, which no JAX array holds")
    record = record.astype(record.dtype.newbyteorder("="), copy=False)
    array = jnp.asarray(record)
    if record.dtype.kind in "iu" and array.dtype != record.dtype:
        # Without `jax_enable_x64`, JAX takes the lower 32 bits.
        if not np.array_equal(array, record):
            raise ValueError(
                f"the file has {record.dtype} numbers that {array.dtype} does not hold: set "
                "`jax.config.update('jax_enable_x64', True)`"
            )
    return array


def _is_key(x: jax.Array | jax.ShapeDtypeStruct) -> bool:
    return jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def _as_key(record: np.ndarray, like: Any) -> jax.Array:
    # A `jax.ShapeDtypeStruct` is not asked directly: the implementation is known of arrays alone.
    implementations = []
    jax.eval_shape(lambda key: implementations.append(jax.random.key_impl(key)), like)
    return jax.random.wrap_key_data(jnp.asarray(record), impl=implementations[0])


def _sharding_on_purpose(like: Any) -> Any:
    if isinstance(like, jax.ShapeDtypeStruct):
        return like.sharding
    return like.sharding if not isinstance(like, Tracer) and like.committed else None


def _as_python_number(record: np.ndarray, kind: type, dtype: Any) -> Any:
    if record.shape != () or not np.can_cast(record.dtype, dtype, "same_kind"):
        raise ValueError(
            f"the file has an array of shape {record.shape} and dtype {record.dtype}, and not one "
            f"number that a Python {kind.__name__} can hold"
        )
    return kind(record.item())
