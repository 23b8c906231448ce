"""The dynamic/static split of transformations that keep nothing from one call to the next."""

from collections.abc import Callable
from typing import Any

import jax.tree_util as jtu
from jaxtyping import PyTree

from .._pytree import is_array


class Rest:
    """A tree from which leaves were taken: it can take others in their places."""

    __slots__ = ("_is_dynamic", "_leaves", "_treedef")

    def __init__(self, leaves: list[Any], is_dynamic: list[bool], treedef: Any):
        self._leaves = leaves
        self._is_dynamic = is_dynamic
        self._treedef = treedef

    def merge(self, dynamic: Any) -> PyTree:
        """The tree with `dynamic`, in order, in the places of the leaves taken."""
        dynamic = iter(dynamic)
        return self._treedef.unflatten(
            [
                next(dynamic) if taken else leaf
                for taken, leaf in zip(self._is_dynamic, self._leaves, strict=True)
            ]
        )

    def merge_into_none(self, dynamic: Any) -> PyTree:
        """The same, with `None` for every other leaf: the tree of a gradient."""
        dynamic = iter(dynamic)
        return self._treedef.unflatten(
            [next(dynamic) if taken else None for taken in self._is_dynamic]
        )


def split(tree: PyTree, is_dynamic: Callable[[Any], bool] = is_array) -> tuple[list[Any], Rest]:
    """Takes the leaves for which `is_dynamic` holds out of `tree`.

    **Returns:** `(dynamic, rest)`, with `rest.merge(dynamic)` being the tree again.
    """
    leaves, treedef = jtu.tree_flatten(tree)
    mask = [is_dynamic(leaf) for leaf in leaves]
    dynamic = [leaf for leaf, taken in zip(leaves, mask, strict=True) if taken]
    static = [None if taken else leaf for leaf, taken in zip(leaves, mask, strict=True)]
    return dynamic, Rest(static, mask, treedef)
