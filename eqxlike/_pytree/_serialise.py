"""Writing the leaves of a pytree to a file, and reading them back."""

import contextlib
import dataclasses
import os
import pathlib
import secrets
import stat
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO, Protocol, TypeVar

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jaxtyping import PyTree

from .._compat import Tracer
from .._dtypes import is_key
from ._difference import map_prefix

# The file format: each leaf is a record in NumPy's `.npy` format, without pickles.
#
# A record holds one number or array, with its shape and dtype. The Python type of a number and the
# implementation of a PRNG key are not written; the reader takes them from `like`. This is Equinox's
# format, so eqxlike can read Equinox's files and Equinox can read ours.
#
# Some dtypes, such as int4, are registered with NumPy by another package. For such a dtype, NumPy
# writes only the number of bytes. If the number is two, the reader assumes bfloat16. For all other
# such dtypes, the writer writes an array with one field. The name of the field is the name of the
# dtype.


class Writable(Protocol):
    """A file open for writing in binary mode, or any object with the same `write` method."""

    def write(self, data: Any, /) -> Any: ...


class Readable(Protocol):
    """A file open for reading in binary mode, or any object with the same `read` method."""

    def read(self, size: int = -1, /) -> bytes: ...


def default_serialise_filter_spec(f: Writable, x: Any) -> None:
    """Writes one leaf: a JAX or NumPy array, a PRNG key, a NumPy scalar or a Python number.

    Leaves of other types, such as functions and strings, are not written. A `jax.Ref` is not
    written either, since its value is not part of the tree.

    **Arguments:**

    - `f`: a file open for writing in binary mode.
    - `x`: the leaf, of any type.

    **Raises:** `ValueError` if `x` is a Python number of more than 64 bits, or an array of Python
    objects. NumPy would have to pickle such values.

    !!! example

        A function that wraps this function can treat some leaves differently. Here JAX arrays are
        skipped.

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
            f"NumPy would pickle this {type(x).__name__}, and reading a pickle runs the code in "
            "it: only numbers of up to 64 bits and arrays of numbers can be written"
        )
    np.save(f, _with_named_dtype(record), allow_pickle=False)


def default_deserialise_filter_spec(f: Readable, x: Any) -> Any:
    """Reads one leaf that `default_serialise_filter_spec` wrote.

    **Arguments:**

    - `f`: a file open for reading in binary mode.
    - `x`: a leaf of the type to return. A `jax.ShapeDtypeStruct` may replace a JAX array. If
      `default_serialise_filter_spec` does not write leaves of this type, `x` is returned.

    **Returns:** the leaf. An array has the shape and dtype in the file, even if they differ from
    `x`. A JAX array is put on the device of `x` if `x` was explicitly put on this device.

    **Raises:**

    - `EOFError` if the file has no further record.
    - `TypeError` if the file is not open in binary mode.
    - `ValueError` if the next bytes are not a complete record, or if they hold pickled objects.
    - `ValueError` if the numbers do not fit the type of `x`. For example, a JAX array cannot hold
      64-bit numbers unless `jax_enable_x64` is set.

    !!! example

        A function that wraps this function can treat some leaves differently. Here each array is
        cast after reading, to load a model that was saved with another precision.

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
        sharding = committed_sharding(x)
        return array if sharding is None else jax.device_put(array, sharding)
    if isinstance(x, np.ndarray | np.generic):
        array = _with_added_dtype(_read_record(f), x.dtype)
        return array if isinstance(x, np.ndarray) else array[()]
    for number_type, codes in _PYTHON_NUMBERS.items():
        if isinstance(x, number_type):
            return _as_python_number(_read_record(f), type(x), codes)
    return x


Tree = TypeVar("Tree")


def tree_serialise_leaves(
    path_or_file: str | os.PathLike[str] | Writable,
    pytree: PyTree,
    filter_spec: PyTree[Callable[[Any, Any], None]] = default_serialise_filter_spec,
    is_leaf: Callable[[Any], bool] | None = None,
) -> None:
    """Writes the leaves of a pytree to a file, one after another.

    If a path is given, the file is replaced atomically at the end. If an exception is raised or the
    process is killed before that, the file keeps its old content.

    **Arguments:**

    - `path_or_file`: a path, or a file open for writing in binary mode. `.eqx` is added to a path
      without a suffix. Writing to an open file starts at its current position.
    - `pytree`: any pytree.
    - `filter_spec`: a function that is called with the file and a leaf, and writes the leaf or
      skips it. `filter_spec` may also be a prefix of `pytree` with such functions as leaves. The
      default writes arrays and numbers; see `default_serialise_filter_spec`.
    - `is_leaf`: as in `jax.tree_util.tree_flatten`, for `pytree`.

    **Raises:**

    - `RuntimeError`, with the path of the leaf, if `filter_spec` raises an exception.
    - `OSError` if the file cannot be opened.
    - `TypeError` if `path_or_file` or a leaf of `filter_spec` has a wrong type.
    - `ValueError` if `filter_spec` is not a prefix of `pytree`.

    !!! example

        >>> import eqxlike as eqx, io, jax.numpy as jnp
        >>> file = io.BytesIO()
        >>> eqx.tree_serialise_leaves(file, {"weight": jnp.arange(3), "steps": 10})
        >>> _ = file.seek(0)
        >>> like = {"weight": jnp.zeros(3, int), "steps": 0}
        >>> eqx.tree_deserialise_leaves(file, like)
        {'steps': 10, 'weight': Array([0, 1, 2], dtype=int32)}
    """
    leaves, _ = _with_functions(filter_spec, pytree, "pytree", is_leaf)
    with _opened(path_or_file, "write") as file:
        for path, leaf in leaves:
            with _naming(path, "could not be written"):
                leaf.function(file, leaf.value)


def tree_deserialise_leaves(
    path_or_file: str | os.PathLike[str] | Readable,
    like: Tree,
    filter_spec: PyTree[Callable[[Any, Any], Any]] = default_deserialise_filter_spec,
    is_leaf: Callable[[Any], bool] | None = None,
) -> Tree:
    """Reads the leaves of a pytree from a file that `tree_serialise_leaves` wrote.

    **Arguments:**

    - `path_or_file`: a path, or a file open for reading in binary mode. `.eqx` is added to a path
      without a suffix. An open file is read from its current position to the end of the last leaf.
      So several trees in one file can be read one after another.
    - `like`: a pytree with the structure of the tree that was written, and leaves of the same
      types, shapes and dtypes. It may be the result of `filter_eval_shape`.
    - `filter_spec`: a function that is called with the file and a leaf of `like`. It reads and
      returns the new leaf; to skip a leaf, it returns the leaf of `like`. `filter_spec` may also be
      a prefix of `like` with such functions as leaves. The default reads arrays and numbers; see
      `default_deserialise_filter_spec`.
    - `is_leaf`: as in `jax.tree_util.tree_flatten`, for `like`.

    **Returns:** a pytree of the structure of `like`, with the leaves that were read.

    **Raises:**

    - `RuntimeError`, with the path of the leaf, if a leaf cannot be read, or if its type, shape or
      dtype differs from the leaf of `like`.
    - `RuntimeError` if `path_or_file` is a path and the file continues after the last leaf.
    - `OSError` if the file cannot be opened.
    - `TypeError` if `path_or_file` or a leaf of `filter_spec` has a wrong type.
    - `ValueError` if `filter_spec` is not a prefix of `like`.

    !!! example

        Here `like` takes no memory, because it has a `jax.ShapeDtypeStruct` instead of each array.

        >>> import eqxlike as eqx, io, jax
        >>> make = lambda key: eqx.nn.Linear(2, 3, key=key)
        >>> file = io.BytesIO()
        >>> eqx.tree_serialise_leaves(file, make(jax.random.key(0)))
        >>> _ = file.seek(0)
        >>> like = eqx.filter_eval_shape(make, jax.random.key(1))
        >>> model = eqx.tree_deserialise_leaves(file, like)
        >>> bool(eqx.tree_equal(model, make(jax.random.key(0))))
        True
    """
    leaves, treedef = _with_functions(filter_spec, like, "like", is_leaf)
    found = []
    with _opened(path_or_file, "read") as file:
        for path, leaf in leaves:
            with _naming(path, f"could not be read as {_expected(leaf.value)}"):
                value = leaf.function(file, leaf.value)
            _check_alike(path, leaf.value, value)
            found.append(value)
        if isinstance(path_or_file, str | os.PathLike) and file.read(1):
            raise RuntimeError(
                f"{path_or_file} continues after the last leaf of `like`. To read the first of "
                "several trees in one file, pass an open file instead of its path."
            )
    return treedef.unflatten(found)


@dataclasses.dataclass(frozen=True)
class _Leaf:
    function: Callable[[Any, Any], Any]
    value: Any


def _with_functions(
    filter_spec: PyTree, pytree: PyTree, name: str, is_leaf: Callable[[Any], bool] | None
) -> tuple[list[tuple[str, _Leaf]], Any]:
    """Returns the leaves of `pytree`, with their paths and their functions, and the treedef."""

    def spread(function: Any, subtree: PyTree) -> PyTree[_Leaf]:
        if not callable(function):
            places = jtu.tree_leaves_with_path(filter_spec)
            path = next(path for path, leaf in places if leaf is function)
            raise TypeError(
                "`filter_spec` must consist of functions that take a file and a leaf; it has "
                f"{function!r} of type {type(function).__name__} at filter_spec{jtu.keystr(path)}."
            )
        return jtu.tree_map(lambda leaf: _Leaf(function, leaf), subtree, is_leaf=is_leaf)

    hint = (
        f"`filter_spec` must be a prefix of `{name}`: it has the same nodes, but a function may "
        "replace a whole subtree."
    )
    tree = map_prefix(spread, filter_spec, pytree, names=("filter_spec", name), hint=hint)
    leaves, treedef = jtu.tree_flatten_with_path(tree)
    return [(f"tree{jtu.keystr(path)}", leaf) for path, leaf in leaves], treedef


@contextlib.contextmanager
def _opened(path_or_file: Any, method: str) -> Iterator[Any]:
    """Opens the file at a path to `read` or `write`; an open file is yielded as it is."""
    if isinstance(path_or_file, str | os.PathLike):
        path = pathlib.Path(path_or_file)
        if not path.suffix and path.name:
            path = path.with_name(f"{path.name}.eqx")
        with open(path, "rb") if method == "read" else open_to_replace(path) as file:
            yield file
    elif hasattr(path_or_file, method):
        yield path_or_file
    else:
        raise TypeError(
            "`path_or_file` must be a str, a pathlib.Path or a file open in binary mode, with a "
            f"method `{method}`; it is of type {type(path_or_file).__name__}."
        )


@contextlib.contextmanager
def _naming(path: str, what_failed: str) -> Iterator[None]:
    """Converts an exception to a `RuntimeError` with the path of the leaf, as Equinox does."""
    try:
        yield
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        raise RuntimeError(f"The leaf at {path} {what_failed}: {reason}") from error


def _check_alike(path: str, like: Any, value: Any) -> None:
    """Raises `RuntimeError` unless `value` has the type, shape and dtype of `like`."""
    expected, found = _expected(like), _describe(value)
    is_of_jax = isinstance(like, jax.Array | jax.ShapeDtypeStruct)
    if expected != found or not (is_of_jax or type(value) is type(like)):
        raise RuntimeError(
            f"The leaf at {path} differs from the leaf of `like`: expected {expected}, but read "
            f"{found}."
        )


def _expected(like: Any) -> str:
    # A `jax.ShapeDtypeStruct`, as returned by `filter_eval_shape`, stands for a JAX array.
    return _describe(like, "JAX array" if isinstance(like, jax.ShapeDtypeStruct) else None)


def _describe(leaf: Any, type_name: str | None = None) -> str:
    type_name = type_name or ("JAX array" if isinstance(leaf, jax.Array) else type(leaf).__name__)
    if isinstance(leaf, jax.Array | jax.ShapeDtypeStruct | np.ndarray):
        return f"{type_name} of shape {leaf.shape} and dtype {leaf.dtype}"
    return type_name


# --- Records: writing and reading one leaf ---


_SAVED = (jax.Array, np.ndarray, np.generic, bool, int, float, complex)

_ADDED_TO_NUMPY = 2
"""The value of `dtype.isbuiltin` for a dtype that a package has registered with NumPy."""


def _with_named_dtype(record: np.ndarray) -> np.ndarray:
    """Views `record` with a dtype whose name NumPy can write to a file."""
    dtype = record.dtype
    if dtype.isbuiltin != _ADDED_TO_NUMPY or dtype == jnp.bfloat16:
        return record
    return record.view([(dtype.name, f"V{dtype.itemsize}")])


def _read_record(f: Readable) -> np.ndarray:
    first = f.read(1)
    if not isinstance(first, bytes):
        raise TypeError("the file is not open in binary mode: use `open(path, 'rb')`")
    if not first:
        raise EOFError("the file ends before this leaf")
    return np.lib.format.read_array(_Resumed(first, f), allow_pickle=False)  # pyright: ignore


class _Resumed:
    """A file whose first byte has already been read."""

    def __init__(self, first: bytes, file: Readable):
        self.first = first
        self.file = file

    def read(self, size: int) -> bytes:
        first, self.first = self.first[:size], self.first[size:]
        return first + self.file.read(size - len(first))


def _as_key(record: np.ndarray, like: Any) -> jax.Array:
    # `like` may be a `jax.ShapeDtypeStruct`, but `key_impl` needs an array. Tracing makes such an
    # array.
    implementations = []
    jax.eval_shape(lambda key: implementations.append(jax.random.key_impl(key)), like)
    data = _as_jax_array(record, np.dtype(np.uint32))
    return jax.random.wrap_key_data(data, impl=implementations[0])


def _as_jax_array(record: np.ndarray, dtype: np.dtype) -> jax.Array:
    record = _with_added_dtype(record, dtype)
    if not jnp.issubdtype(record.dtype, np.number) and record.dtype != np.bool_:
        raise ValueError(f"the file has values of dtype {record.dtype}, which JAX does not support")
    record = record.astype(record.dtype.newbyteorder("="), copy=False)
    canonical = jax.dtypes.canonicalize_dtype(record.dtype)
    if canonical != record.dtype:
        raise ValueError(
            f"the file has numbers of dtype {record.dtype}, which JAX would cast to {canonical}: "
            "set `jax.config.update('jax_enable_x64', True)`, or pass a `filter_spec` that reads "
            "them into a NumPy array and casts it"
        )
    return jax.device_put(record)


def _with_added_dtype(record: np.ndarray, like: np.dtype) -> np.ndarray:
    """The inverse of `_with_named_dtype`. If the file does not name the dtype, `like` is used."""
    dtype = record.dtype
    if dtype.kind != "V" or dtype == like:
        return record
    added = dtype
    if dtype.names is None:
        # Equinox's files do not record which one-byte dtype was written.
        added = jnp.dtype(jnp.bfloat16) if dtype.itemsize == 2 else like
    elif len(dtype.names) == 1:
        with contextlib.suppress(TypeError):  # The name of the field may be no dtype.
            added = np.dtype(dtype.names[0])
    is_added = added.isbuiltin == _ADDED_TO_NUMPY and added.itemsize == dtype.itemsize
    return record.view(added) if is_added else record


def committed_sharding(like: Any) -> jax.sharding.Sharding | None:
    """The sharding of `like` if its device was chosen explicitly; otherwise `None`."""
    if isinstance(like, jax.ShapeDtypeStruct):
        return like.sharding
    is_committed = isinstance(like, jax.Array) and not isinstance(like, Tracer) and like.committed
    return like.sharding if is_committed else None


_PYTHON_NUMBERS: dict[type, str] = {
    bool: "?",
    int: np.typecodes["AllInteger"],
    float: "efd",
    complex: "FD",
}
"""For each Python type, the codes of the NumPy dtypes whose values convert to it exactly."""


def _as_python_number(record: np.ndarray, number_type: type, codes: str) -> Any:
    if record.shape != () or record.dtype.char not in codes:
        raise ValueError(
            f"the file has an array of shape {record.shape} and dtype {record.dtype}, which is not "
            f"a single Python {number_type.__name__}"
        )
    return number_type(record.item())


# --- Atomic replacement of files: a reader finds the old or the new content, never a mixture ---


@contextlib.contextmanager
def open_to_replace(path: pathlib.Path) -> Iterator[BinaryIO]:
    """Context manager like `open(path, "wb")` that replaces the file atomically at the end.

    The file keeps its old content until the `with` block ends. It also keeps its old content if the
    block raises an exception or the process is killed. As with `open`, symbolic links are followed,
    an existing file keeps its permissions, and a new file gets the default permissions. A path that
    is not a regular file, such as a pipe or a device, is written directly.

    **Arguments:**

    - `path`: the file. Its directory must be writable.

    **Raises:** `OSError` if the file cannot be written, as with `open`.
    """
    target = pathlib.Path(os.path.realpath(path))
    try:
        mode = target.stat().st_mode
    except FileNotFoundError:
        mode = None
    if mode is not None and (not stat.S_ISREG(mode) or not os.access(target, os.W_OK)):
        # If the path is a directory or not writable, `open` raises the usual error.
        with open(path, "wb") as file:
            yield file
        return
    # The name is shortened, since file systems limit the length of names.
    temporary = target.with_name(f".{target.name[:50]}.{secrets.token_hex(8)}.tmp")
    file = _create(temporary, named=path)
    try:
        with file:
            if mode is not None:
                os.chmod(temporary, stat.S_IMODE(mode))
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _create(temporary: pathlib.Path, named: pathlib.Path) -> BinaryIO:
    try:
        return open(temporary, "xb")
    except OSError as error:
        # The error names the user's file, not the temporary one. `OSError` chooses its subclass by
        # `errno`.
        reason = f"{error.strerror} (for a temporary file next to it)"
        raise OSError(error.errno, reason, str(named)) from None
