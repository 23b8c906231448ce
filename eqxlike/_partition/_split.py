"""The dynamic/static split of transformations that cache nothing from one call to the next."""

from collections.abc import Callable, Iterable
from typing import Any

import jax.tree_util as jtu
from jaxtyping import PyTree

from .._module import name_again, names_in
from .._pytree import flag_leaves, is_array
from ._same import is_same_static


class Rest:
    """A tree from which leaves were taken, and which can take others in their places.

    Two are equal if the same leaves were taken, and all else is interchangeable in a trace.

    - `treedef`: the treedef of the whole tree.
    """

    __slots__ = ("_is_dynamic", "_leaves", "_paths", "treedef")

    def __init__(self, leaves: list[Any], is_dynamic: list[bool], treedef: Any):
        self._leaves = leaves
        self._is_dynamic = is_dynamic
        self._paths: tuple[str | None, ...] | None = None
        self.treedef = treedef

    def __repr__(self) -> str:
        return f"Rest({self.treedef})"

    def __eq__(self, other: object) -> bool:
        if type(other) is not Rest:
            return NotImplemented
        return (
            self._is_dynamic == other._is_dynamic
            and self.treedef == other.treedef
            and all(map(is_same_static, self._leaves, other._leaves))
        )

    def __hash__(self) -> int:
        # Not all leaves are hashable.
        return hash((self.treedef, tuple(self._is_dynamic)))

    def keep_names_of(self, tree: PyTree) -> None:
        """The layers in trees merged from this one have the names of those in `tree`."""
        self._paths = names_in(tree)

    def leaves(self, dynamic: Iterable[Any]) -> list[Any]:
        """All leaves, with `dynamic`, in order, in the places of those taken."""
        dynamic = iter(dynamic)
        return [
            next(dynamic) if taken else leaf
            for taken, leaf in zip(self._is_dynamic, self._leaves, strict=True)
        ]

    def leaves_into(self, other: Any, dynamic: Iterable[Any]) -> list[Any]:
        """All leaves, as in `leaves`, but with `other` for every leaf that was not taken."""
        dynamic = iter(dynamic)
        return [next(dynamic) if taken else other for taken in self._is_dynamic]

    def merge(self, dynamic: Iterable[Any]) -> PyTree:
        """The tree with `dynamic`, in order, in the places of the leaves taken."""
        tree = self.treedef.unflatten(self.leaves(dynamic))
        if self._paths is not None:
            name_again(tree, self._paths)
        return tree

    def merge_into(self, other: Any, dynamic: Iterable[Any]) -> PyTree:
        """The tree as in `merge`, but with `other` for every leaf that was not taken.

        With `None` this is the tree of a gradient.
        """
        return self.treedef.unflatten(self.leaves_into(other, dynamic))

    def take(self, leaves: Iterable[Any]) -> list[Any]:
        """The values in the places of the leaves taken, from one value for each leaf."""
        return [leaf for taken, leaf in zip(self._is_dynamic, leaves, strict=True) if taken]


UNTRACED: Any = None
"""A placeholder for the `Rest` of an output until the function has been traced."""


def split(tree: PyTree, is_dynamic: Callable[[Any], bool] = is_array) -> tuple[list[Any], Rest]:
    """Takes the leaves for which `is_dynamic` holds out of `tree`.

    **Returns:** `(dynamic, rest)`, with `rest.merge(dynamic)` being the tree again.
    """
    leaves, treedef = jtu.tree_flatten(tree)
    dynamic, rest = split_leaves(leaves, treedef, flag_leaves(tree, leaves, is_dynamic))
    rest.keep_names_of(tree)
    return dynamic, rest


def split_leaves(leaves: list[Any], treedef: Any, is_dynamic: list[bool]) -> tuple[list[Any], Rest]:
    """The `split` of the tree with these leaves, by one `bool` for each."""
    dynamic = [leaf for leaf, taken in zip(leaves, is_dynamic, strict=True) if taken]
    static = [None if taken else leaf for leaf, taken in zip(leaves, is_dynamic, strict=True)]
    return dynamic, Rest(static, is_dynamic, treedef)
