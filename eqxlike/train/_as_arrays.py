"""Batches of other libraries as arrays: tensors, lists of numbers, mappings."""

import contextlib
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np

_ARRAYS = jax.Array | np.ndarray | np.generic
_NUMBERS = bool | int | float | complex | np.generic

OnStatic = Callable[[str, Any, bool], None]
"""`on_static(path, leaf, is_in_list)`."""

_ARRAY_TYPES: set[type] = set()
"""The types of arrays that were seen: to look a type up costs less than `isinstance`."""


def as_arrays(batch: Any, taker: str, on_static: OnStatic | None = None) -> Any:
    """The batch with NumPy arrays in place of lists of numbers and of other libraries' tensors.

    A number in any other list becomes an array of shape `()`. A mapping that is no pytree, such as
    a `UserDict`, becomes a dict. Numbers, texts and other objects outside of lists stay.

    **Arguments:**

    - `on_static`: called for each leaf that stays and is no array.

    **Raises:** `TypeError` with the path for a tensor that NumPy cannot read; `ValueError` for rows
    of several lengths.
    """
    leaves = jtu.tree_leaves(batch)
    if _ARRAY_TYPES.issuperset(map(type, leaves)):
        return batch
    _ARRAY_TYPES.update(type(leaf) for leaf in leaves if isinstance(leaf, _ARRAYS))

    def converted(leaf: Any, path: str, is_in_list: bool) -> Any:
        if type(leaf) is list:
            if not _is_list_of(_NUMBERS, leaf):
                return [convert(each, f"{path}[{i}]", True) for i, each in enumerate(leaf)]
            try:
                return np.asarray(leaf)
            except ValueError as error:
                raise ValueError(
                    f"{taker} expected rows of one length, and {path} has several: pad them, or "
                    "make arrays of the parts."
                ) from error
        if isinstance(leaf, Mapping):
            return convert(dict(leaf), path, is_in_list)
        if _is_foreign(leaf):
            return _as_numpy(leaf, path, taker)
        if is_in_list and isinstance(leaf, _NUMBERS):
            return np.asarray(leaf)
        if on_static is not None and not isinstance(leaf, _ARRAYS):
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
    """Raises `TypeError` for what `as_arrays` would convert, in a step that is being traced: it is
    static there, and each batch would be traced again.
    """

    def check(path: Any, leaf: Any) -> None:
        if type(leaf) is list or isinstance(leaf, Mapping) or _is_foreign(leaf):
            raise TypeError(
                f"The step expected a batch of arrays, and batch{jtu.keystr(path)} is a "
                f"{type(leaf).__name__}, for which each batch is traced again: pass it through "
                "`np.asarray`, or a mapping through `dict`, or train with `train.fit`."
            )

    is_data = functools.partial(_is_list_of, _NUMBERS | str | bytes)
    jtu.tree_map_with_path(check, batch, is_leaf=is_data)


def _is_list_of(types: Any, node: Any) -> bool:
    """Whether something is a list, also of lists, with leaves of these types alone."""
    if type(node) is not list or not node:
        return False
    inside = jtu.tree_leaves(node, is_leaf=lambda each: each is None)
    return all(isinstance(each, types) for each in inside)


def _is_foreign(leaf: Any) -> bool:
    """Whether something is an array of another library."""
    names = "__array__", "__array_interface__", "__dlpack__"
    return not isinstance(leaf, _ARRAYS) and any(hasattr(type(leaf), name) for name in names)


def _as_numpy(tensor: Any, path: str, taker: str) -> Any:
    """A tensor of another library, also of a dtype that NumPy lacks, or on a device."""
    tensor = tensor.detach() if hasattr(tensor, "detach") else tensor
    try:
        return np.asarray(tensor)
    except Exception as error:
        with contextlib.suppress(Exception):
            return jnp.array(jnp.from_dlpack(tensor))
        raise TypeError(
            f"{taker} expected an array, and {path} is a {type(tensor).__name__} that NumPy cannot "
            f"read: {error}"
        ) from error
