"""One leaf of a pytree in a file: a record in NumPy's `.npy` format, of which pickles are no part.

The record says shape and dtype of a number or an array; of which type it was in Python, and which
implementation a PRNG key was for, says `like` at reading. As Equinox does it, so that either
library reads the files of the other. Of a dtype that a package has registered with NumPy, such as
int4, NumPy writes the number of bytes alone: two are a bfloat16, and for the others a record here
is an array of one field with the name of the dtype.
"""

from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from .._compat import Tracer
from .._dtypes import is_key


class Writable(Protocol):
    """The target of a leaf: a file open in binary mode, or whatever has its `write`."""

    def write(self, data: Any, /) -> Any: ...


class Readable(Protocol):
    """The source of a leaf: a file open in binary mode, or whatever has its `read`."""

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
    if isinstance(x, jax.Array) and is_key(x):
        x = jax.random.key_data(x)
    if not isinstance(x, _SAVED):
        return
    record = np.asarray(x)
    if record.dtype.hasobject:
        raise ValueError(
            f"NumPy would pickle this {type(x).__name__}, and whoever reads pickles runs the code "
            "in them: only numbers of up to 64 bits and arrays of numbers can be written"
        )
    np.save(f, _with_named_dtype(record), allow_pickle=False)


def default_deserialise_filter_spec(f: Readable, x: Any) -> Any:
    """Reads one leaf that `default_serialise_filter_spec` has written.

    **Arguments:**

    - `f`: a file open for reading in binary mode.
    - `x`: a leaf of the type to return; in the place of a JAX array a `jax.ShapeDtypeStruct` will
      do. Leaves of types that are not written are returned as they are.

    **Returns:** the leaf. An array has shape and dtype of the file, whatever those of `x`. It lies
    where `x` was put, if `x` was put somewhere on purpose.

    **Raises:** `EOFError` if the file has no further record; `ValueError` if what follows is no
    record, is cut off, holds pickled objects, or has numbers that the type of `x` cannot have, such
    as those of 64 bits for a JAX array unless `jax_enable_x64` is set; `TypeError` if the file is
    not open in binary mode.

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
        array = _as_key(record, x) if is_key(x) else _as_jax_array(record, x.dtype)
        sharding = _sharding_on_purpose(x)
        return array if sharding is None else jax.device_put(array, sharding)
    if isinstance(x, np.ndarray):
        return _with_added_dtype(_read_record(f), x.dtype)
    if isinstance(x, np.generic):
        return _with_added_dtype(_read_record(f), x.dtype)[()]
    for number_type, codes in _PYTHON_NUMBERS.items():
        if isinstance(x, number_type):
            return _as_python_number(_read_record(f), type(x), codes)
    return x


def has_record(like: Any) -> bool:
    """Whether `default_deserialise_filter_spec` reads a record in the place of `like`."""
    return isinstance(like, (*_SAVED, jax.ShapeDtypeStruct))


_SAVED = (jax.Array, np.ndarray, np.generic, bool, int, float, complex)

_PYTHON_NUMBERS: dict[type, str] = {
    bool: "?",
    int: np.typecodes["AllInteger"],
    float: "efd",
    complex: "FD",
}
"""The dtypes, as NumPy calls them, whose numbers are such numbers of Python to the bit."""

_ADDED_TO_NUMPY = 2
"""`dtype.isbuiltin` is this for a dtype that a package has registered with NumPy."""


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


def _with_named_dtype(record: np.ndarray) -> np.ndarray:
    """`record` with a dtype that NumPy can describe in a file."""
    dtype = record.dtype
    if dtype.isbuiltin != _ADDED_TO_NUMPY or dtype == jnp.bfloat16:
        return record
    return record.view([(dtype.name, f"V{dtype.itemsize}")])


def _with_added_dtype(record: np.ndarray, like: np.dtype) -> np.ndarray:
    """The array that `_with_named_dtype` was given, of dtype `like` if the file names none."""
    dtype = record.dtype
    if dtype.kind != "V" or dtype == like:
        return record
    if dtype.names is not None:
        added = _added_dtype(dtype.names[0]) if len(dtype.names) == 1 else None
    elif dtype.itemsize == jnp.dtype(jnp.bfloat16).itemsize:
        added = jnp.dtype(jnp.bfloat16)
    else:
        # Files of Equinox's do not say which dtype of one byte this was.
        added = like if like.isbuiltin == _ADDED_TO_NUMPY else None
    if added is None or added.itemsize != dtype.itemsize:
        return record
    return record.view(added)


def _added_dtype(name: str) -> np.dtype | None:
    try:
        dtype = np.dtype(name)
    except TypeError:
        return None
    return dtype if dtype.isbuiltin == _ADDED_TO_NUMPY else None


def _as_jax_array(record: np.ndarray, dtype: np.dtype) -> jax.Array:
    record = _with_added_dtype(record, dtype)
    if not jnp.issubdtype(record.dtype, np.number) and record.dtype != np.bool_:
        raise ValueError(f"the file has values of dtype {record.dtype}, which no JAX array holds")
    record = record.astype(record.dtype.newbyteorder("="), copy=False)
    canonical = jax.dtypes.canonicalize_dtype(record.dtype)
    if canonical != record.dtype:
        raise ValueError(
            f"the file has numbers of dtype {record.dtype}, of which JAX would make {canonical}: "
            "set `jax.config.update('jax_enable_x64', True)`, or pass a `filter_spec` that reads "
            "them into a NumPy array and casts that"
        )
    return jnp.asarray(record)


def _as_key(record: np.ndarray, like: Any) -> jax.Array:
    # A `jax.ShapeDtypeStruct` is not asked directly: the implementation is known of arrays alone.
    implementations = []
    jax.eval_shape(lambda key: implementations.append(jax.random.key_impl(key)), like)
    data = _as_jax_array(record, np.dtype(np.uint32))
    return jax.random.wrap_key_data(data, impl=implementations[0])


def _sharding_on_purpose(like: Any) -> Any:
    if isinstance(like, jax.ShapeDtypeStruct):
        return like.sharding
    return like.sharding if not isinstance(like, Tracer) and like.committed else None


def _as_python_number(record: np.ndarray, number_type: type, codes: str) -> Any:
    if record.shape != () or record.dtype.char not in codes:
        raise ValueError(
            f"the file has an array of shape {record.shape} and dtype {record.dtype}, and not one "
            f"number that is a Python {number_type.__name__}"
        )
    return number_type(record.item())
