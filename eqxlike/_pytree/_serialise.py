"""Writing the leaves of a pytree to a file, and reading them back."""

import contextlib
import dataclasses
import os
import pathlib
from collections.abc import Callable, Iterator
from typing import Any, TypeVar, cast

import jax
import jax.tree_util as jtu
import numpy as np
from jaxtyping import PyTree

from ._atomic_file import open_to_replace
from ._file_structure import explain_structure
from ._leaf_format import (
    Readable,
    Writable,
    default_deserialise_filter_spec,
    default_serialise_filter_spec,
)
from ._prefix import map_prefix

Tree = TypeVar("Tree")


def tree_serialise_leaves(
    path_or_file: str | os.PathLike[str] | Writable,
    pytree: PyTree,
    filter_spec: PyTree[Callable[[Any, Any], None]] = default_serialise_filter_spec,
    is_leaf: Callable[[Any], bool] | None = None,
) -> None:
    """Writes the leaves of a pytree to a file, one after another.

    A file named by its path is replaced as a whole, at the end: if something is raised before, or
    the process killed, what was there stays.

    **Arguments:**

    - `path_or_file`: a path, to which `.eqx` is added if it has no suffix, or a file open for
      writing in binary mode, which is written from where it stands.
    - `pytree`: any pytree.
    - `filter_spec`: a function of the file and a leaf that writes the leaf or skips it, or a
      prefix of `pytree` of such functions. By default arrays and numbers are written; see
      `default_serialise_filter_spec`.
    - `is_leaf`: as in `jax.tree_util.tree_flatten`, for `pytree`.

    **Raises:** `RuntimeError`, naming the path of the leaf, if `filter_spec` raises; `OSError` if
    the file cannot be opened; `TypeError` if an argument is of another type; `ValueError` if
    `filter_spec` is not a prefix of `pytree`.

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
    """Reads the leaves of a pytree from a file that `tree_serialise_leaves` has written.

    **Arguments:**

    - `path_or_file`: a path, to which `.eqx` is added if it has no suffix, or a file open for
      reading in binary mode, which is read from where it stands and left behind the last leaf:
      of several trees written one after another each is read in turn.
    - `like`: a pytree of the structure that was written, with leaves of the same types, shapes and
      dtypes. What `filter_eval_shape` makes of a model will do.
    - `filter_spec`: a function of the file and a leaf of `like` that returns the leaf read, or the
      one of `like` for one that was skipped; or a prefix of `like` of such functions. By default
      arrays and numbers are read; see `default_deserialise_filter_spec`.
    - `is_leaf`: as in `jax.tree_util.tree_flatten`, for `like`.

    **Returns:** a pytree of the structure of `like`, with the leaves that were read.

    **Raises:** `RuntimeError`, naming the path of the leaf, if one cannot be read or its type,
    shape or dtype differs from that in `like`; also if a file named by its path goes on after the
    last leaf. It says first, as far as shapes tell, if the file is of another structure. `OSError`
    if the file cannot be opened; `TypeError` if an argument is of another type; `ValueError` if
    `filter_spec` is not a prefix of `like`.

    !!! example

        The model to read into needs no memory of its own.

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
    is_whole = _is_path(path_or_file)
    with (
        _opened(path_or_file, "read") as file,
        _explaining_structure(file, [leaf for _, leaf in leaves], is_whole),
    ):
        for path, leaf in leaves:
            with _naming(path, f"could not be read as {_expected(leaf.value)}"):
                value = leaf.function(file, leaf.value)
            _check_alike(path, leaf.value, value)
            found.append(value)
        if is_whole and file.read(1):
            raise RuntimeError(
                f"{path_or_file} goes on after the last leaf of `like`. To read the first of "
                "several trees in one file, open the file and pass that."
            )
    return treedef.unflatten(found)


@dataclasses.dataclass(frozen=True)
class _Leaf:
    function: Callable[[Any, Any], Any]
    value: Any


def _with_functions(
    filter_spec: PyTree, pytree: PyTree, name: str, is_leaf: Callable[[Any], bool] | None
) -> tuple[list[tuple[str, _Leaf]], Any]:
    """Each leaf of `pytree` with the function that `filter_spec` has for it, by its path; and the
    treedef.
    """

    def spread(function: Any, subtree: PyTree) -> PyTree[_Leaf]:
        if not callable(function):
            places = jtu.tree_leaves_with_path(filter_spec)
            path = next(path for path, leaf in places if leaf is function)
            raise TypeError(
                "`filter_spec` must consist of functions of a file and a leaf; it has "
                f"{function!r} of type {type(function).__name__} at filter_spec{jtu.keystr(path)}."
            )
        return jtu.tree_map(lambda leaf: _Leaf(function, leaf), subtree, is_leaf=is_leaf)

    advice = (
        f"`filter_spec` must be a prefix of `{name}`: the same nodes, down to a function for all "
        "that lies below."
    )
    tree = map_prefix(spread, filter_spec, pytree, names=("filter_spec", name), advice=advice)
    leaves, treedef = jtu.tree_flatten_with_path(tree)
    return [(f"tree{jtu.keystr(path)}", leaf) for path, leaf in leaves], treedef


def _is_path(path_or_file: Any) -> bool:
    return isinstance(path_or_file, str | os.PathLike)


@contextlib.contextmanager
def _opened(path_or_file: Any, method: str) -> Iterator[Any]:
    """The file at a path, opened to `read` or `write`, or the open file that was given."""
    if _is_path(path_or_file):
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
    """Names the leaf in what is raised, by `RuntimeError` as in Equinox."""
    try:
        yield
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        raise RuntimeError(f"The leaf at {path} {what_failed}: {reason}") from error


@contextlib.contextmanager
def _explaining_structure(file: Any, leaves: list[_Leaf], is_whole: bool) -> Iterator[None]:
    """Says first in what is raised if the whole file does not fit, and not one leaf alone."""
    # A function of the user alone knows how much of the file belongs to a leaf.
    is_known = all(leaf.function is default_deserialise_filter_spec for leaf in leaves)
    can_seek = is_known and hasattr(file, "seekable") and file.seekable()
    start = file.tell() if can_seek else 0
    try:
        yield
    except RuntimeError as error:
        likes = [leaf.value for leaf in leaves]
        sentence = explain_structure(file, start, likes, is_whole) if can_seek else ""
        if not sentence:
            raise
        raise RuntimeError(f"{sentence}{error}") from error.__cause__


def _check_alike(path: str, like: Any, value: Any) -> None:
    """Raises `RuntimeError` if `value` cannot stand in the place of `like`."""
    if isinstance(like, jax.Array | jax.ShapeDtypeStruct):
        is_alike = isinstance(value, jax.Array)
    else:
        is_alike = type(value) is type(like)
    if is_alike and isinstance(like, jax.Array | jax.ShapeDtypeStruct | np.ndarray):
        array = cast(jax.Array, value)
        is_alike = array.shape == like.shape and array.dtype == like.dtype
    if not is_alike:
        raise RuntimeError(
            f"The leaf at {path} differs from that in `like`: expected {_expected(like)}, and "
            f"reading gave {_describe(value)}."
        )


def _expected(like: Any) -> str:
    # Where `filter_eval_shape` put a struct, an array is to come.
    return _describe(like, "JAX array" if isinstance(like, jax.ShapeDtypeStruct) else None)


def _describe(leaf: Any, type_name: str | None = None) -> str:
    type_name = type_name or ("JAX array" if isinstance(leaf, jax.Array) else type(leaf).__name__)
    if isinstance(leaf, jax.Array | jax.ShapeDtypeStruct | np.ndarray):
        return f"{type_name} of shape {leaf.shape} and dtype {leaf.dtype}"
    return type_name
