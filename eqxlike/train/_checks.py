"""Checks of arguments, with errors that name a remedy, and conversion of batches to arrays."""

import contextlib
import functools
import inspect
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jaxtyping import PyTree

from .. import is_array, tree_pformat
from ..extend import deleted_paths, listed


def check_callable(value: Any, call: str, taker: str) -> None:
    """Raises `TypeError` if `value` is not callable."""
    if not callable(value):
        name = call.partition("(")[0]
        raise TypeError(
            f"{taker} expected `{name}` to be a function, `{call}`; got {tree_pformat(value)}."
        )


def check_takes(function: Callable[..., Any], call: str, taker: str, hint: str = "") -> None:
    """Raises `TypeError` if `function` is not callable, or does not take the positional arguments
    that `call` shows.
    """
    check_callable(function, call, taker)
    names = call.partition("(")[2].rstrip(")").split(", ")
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return  # Some callables have no signature.
    try:
        signature.bind(*names)
    except TypeError as error:
        name = getattr(function, "__name__", type(function).__name__)
        raise TypeError(
            f"{taker} calls `{call}`, but {name} does not accept these arguments: {error}.{hint}"
        ) from None


@contextlib.contextmanager
def importing(purpose: str, extra: str) -> Iterator[None]:
    """Context manager for imports that need an extra. Its `ImportError` tells how to install the
    extra.
    """
    try:
        yield
    except ImportError as error:
        raise ImportError(f"{purpose}: `pip install 'eqxlike[{extra}]'`.") from error


def check_folder(folder: Any, name: str) -> None:
    """Raises `TypeError` if `folder` is not a path, `NotADirectoryError` if it is a file."""
    expected = f"{name} must be the path of a folder of checkpoints"
    if not isinstance(folder, str | os.PathLike):
        got = repr(folder) if jtu.all_leaves([folder]) else f"a {type(folder).__name__}"
        raise TypeError(f"{expected}, got {got}.")
    if os.path.exists(folder) and not os.path.isdir(folder):
        raise NotADirectoryError(f"{expected}, but {os.fspath(folder)!r} is a file.")


def check_not_deleted(tree: PyTree, name: str, taker: str) -> None:
    """Raises `RuntimeError` if arrays of `tree` were donated. JAX would notice the donation only
    later.
    """
    paths = deleted_paths(tree, name)
    if paths:
        raise RuntimeError(
            f"{taker} got a {name} with arrays that were donated to a call and are deleted: "
            f"{listed(paths)}. A training step donates its state: use the state that it returned, "
            "or pass it a copy, "
            "`jax.tree.map(lambda leaf: leaf.copy() if eqx.is_array(leaf) else leaf, state)`."
        )


# --- Conversion of batches to arrays ---


_NUMBERS = bool | int | float | complex | np.generic

OnStatic = Callable[[str, Any, bool], None]
"""`on_static(path, leaf, is_in_list)` is called for each leaf that is not an array."""

_ARRAY_TYPES: set[type] = set()
"""Array types seen so far. They are stored because a look-up is cheaper than `isinstance`."""


def as_arrays(batch: Any, taker: str, on_static: OnStatic | None = None) -> Any:
    """Converts lists of numbers and tensors of other libraries in a batch to NumPy arrays.

    A list that contains only numbers, or lists of numbers, becomes one array. A number in any other
    list becomes an array of shape `()`. A mapping that is not a pytree, such as a `UserDict`,
    becomes a dict. Numbers, strings and other objects outside lists are unchanged.

    **Arguments:**

    - `taker`: name of the calling function, for error messages.
    - `on_static`: called for each unchanged leaf that is not an array.

    **Raises:** `TypeError`, with the path of the tensor, if NumPy cannot read a tensor.
    `ValueError` if the rows of a list of lists have different lengths.
    """
    leaves = jtu.tree_leaves(batch)
    if _ARRAY_TYPES.issuperset(map(type, leaves)):
        return batch
    # Do not add the types of NumPy scalars: a NumPy scalar counts as an array, except in a list.
    _ARRAY_TYPES.update(type(leaf) for leaf in leaves if isinstance(leaf, jax.Array | np.ndarray))

    def converted(leaf: Any, path: str, is_in_list: bool) -> Any:
        if type(leaf) is list:
            if not _is_list_of(_NUMBERS, leaf):
                return [convert(each, f"{path}[{i}]", True) for i, each in enumerate(leaf)]
            try:
                return np.asarray(leaf)
            except ValueError as error:
                raise ValueError(
                    f"{taker} expected rows of equal length, but rows of {path} differ in length: "
                    "pad them, or convert each row to an array."
                ) from error
        if isinstance(leaf, Mapping):
            return convert(dict(leaf), path, is_in_list)
        if is_foreign(leaf):
            return _as_numpy(leaf, path, taker)
        if is_in_list and isinstance(leaf, _NUMBERS):
            return np.asarray(leaf)
        if on_static is not None and not is_array(leaf):
            on_static(path, leaf, is_in_list)
        return leaf

    def convert(tree: Any, path: str, is_in_list: bool = False) -> Any:
        return jtu.tree_map_with_path(
            lambda keys, leaf: converted(leaf, path + jtu.keystr(keys), is_in_list),
            tree,
            is_leaf=lambda node: type(node) is list,
        )

    return convert(batch, "batch")


def check_arrays(batch: Any) -> None:
    """Raises `TypeError` for a leaf that `as_arrays` would convert.

    A step calls this function while the step is traced. A leaf that is not an array would be
    static, so the step would be traced again for each batch.
    """

    def check(path: Any, leaf: Any) -> None:
        if type(leaf) is list or isinstance(leaf, Mapping) or is_foreign(leaf):
            raise TypeError(
                f"The step expected a batch of arrays, but batch{jtu.keystr(path)} is a "
                f"{type(leaf).__name__}, so the step would be traced again for each batch. Convert "
                "a mapping with `dict` and other objects with `np.asarray`, or train with "
                "`train.fit`."
            )

    is_data = functools.partial(_is_list_of, _NUMBERS | str | bytes)
    jtu.tree_map_with_path(check, batch, is_leaf=is_data)


def _is_list_of(types: Any, node: Any) -> bool:
    """Returns True if a node is a list, possibly nested, and all its leaves have these types."""
    if type(node) is not list or not node:
        return False
    inside = jtu.tree_leaves(node, is_leaf=lambda each: each is None)
    return all(isinstance(each, types) for each in inside)


def is_foreign(leaf: Any) -> bool:
    """Returns True if a leaf is an array of a library other than JAX and NumPy."""
    names = "__array__", "__array_interface__", "__dlpack__"
    return not is_array(leaf) and any(hasattr(type(leaf), name) for name in names)


def _as_numpy(tensor: Any, path: str, taker: str) -> Any:
    """Converts a tensor of another library to a NumPy array.

    The tensor may be on a device, and may have a dtype that NumPy does not have.
    """
    tensor = tensor.detach() if hasattr(tensor, "detach") else tensor
    try:
        return np.asarray(tensor)
    except Exception as error:
        with contextlib.suppress(Exception):
            return jnp.array(jnp.from_dlpack(tensor))
        raise TypeError(
            f"{taker} expected an array, but {path} is a {type(tensor).__name__} that NumPy cannot "
            f"read: {error}"
        ) from error
