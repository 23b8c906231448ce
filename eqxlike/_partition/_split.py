"""Splits a tree into dynamic and static leaves, for transformations that cache nothing."""

from collections.abc import Callable, Iterable
from typing import Any

import jax.tree_util as jtu
from jaxtyping import PyTree

from .._module import name_again, names_in
from .._pytree import Difference, children_with_keys, flag_leaves, is_array
from ._flatten import flatten
from ._static_key import StaticKey, is_hashable


class Rest:
    """A tree whose dynamic leaves were removed. `merge` puts new leaves in their place.

    Two `Rest`s are equal if they may share a trace. This requires the same treedef, the same static
    leaves, and the same positions of the removed leaves.

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
        # The leaves are left out, since some of them may not be hashable.
        return hash((self.treedef, tuple(self._is_dynamic)))

    def leaves(self, dynamic: Iterable[Any]) -> list[Any]:
        """All leaves of the tree: the values of `dynamic`, in order, replace the removed leaves."""
        dynamic = iter(dynamic)
        return [
            next(dynamic) if taken else leaf
            for taken, leaf in zip(self._is_dynamic, self._leaves, strict=True)
        ]

    def leaves_into(self, other: Any, dynamic: Iterable[Any]) -> list[Any]:
        """The same as `leaves`, but every static leaf is replaced by `other`."""
        dynamic = iter(dynamic)
        return [next(dynamic) if taken else other for taken in self._is_dynamic]

    def merge(self, dynamic: Iterable[Any]) -> PyTree:
        """Returns the whole tree: the values of `dynamic`, in order, replace the removed leaves."""
        tree = self.treedef.unflatten(self.leaves(dynamic))
        if self._paths is not None:
            name_again(tree, self._paths)
        return tree

    def merge_into(self, other: Any, dynamic: Iterable[Any]) -> PyTree:
        """The same as `merge`, but every static leaf is replaced by `other`.

        If `other` is `None`, the result has the structure of a gradient.
        """
        return self.treedef.unflatten(self.leaves_into(other, dynamic))

    def take(self, leaves: Iterable[Any]) -> list[Any]:
        """Given a value for each leaf of the tree, selects the values of the removed leaves."""
        return [leaf for taken, leaf in zip(self._is_dynamic, leaves, strict=True) if taken]


UNTRACED: Any = None
"""A placeholder for the `Rest`, or other data, of an output until the function has been traced."""


def split(tree: PyTree, is_dynamic: Callable[[Any], bool] = is_array) -> tuple[list[Any], Rest]:
    """Takes the leaves for which `is_dynamic` is true out of `tree`.

    **Returns:** `(dynamic, rest)`. `rest.merge(dynamic)` returns the tree again.
    """
    leaves, treedef = jtu.tree_flatten(tree)
    dynamic, rest = split_leaves(leaves, treedef, flag_leaves(tree, leaves, is_dynamic))
    # The paths give the layers in a merged tree the names of the layers in `tree`.
    rest._paths = names_in(tree)
    return dynamic, rest


def split_leaves(leaves: list[Any], treedef: Any, is_dynamic: list[bool]) -> tuple[list[Any], Rest]:
    """Does the same as `split` for a flattened tree. `is_dynamic` has a flag for each leaf."""
    dynamic = [leaf for leaf, taken in zip(leaves, is_dynamic, strict=True) if taken]
    static = [None if taken else leaf for leaf, taken in zip(leaves, is_dynamic, strict=True)]
    return dynamic, Rest(static, is_dynamic, treedef)


# --- Whether two static values, or two trees, may share a trace ---


def is_same_static(first: Any, second: Any) -> bool:
    """Returns `True` if two static leaves are interchangeable in a trace at this moment.

    As in `filter_jit`, leaves are compared by type and value, but functions and unhashable leaves
    are compared by identity.

    >>> import jax
    >>> is_same_static(1, 1), is_same_static(1, True), is_same_static(1, 1.0)
    (True, False, False)
    >>> is_same_static(lambda x: x, lambda x: x), is_same_static(jax.nn.relu, jax.nn.relu)
    (False, True)
    """
    if first is second:
        return True
    # Both keys must be alive during the comparison. A key contains the `id`s of objects, and keeps
    # these objects alive.
    keys = [StaticKey(each, by_identity=not is_hashable(each)) for each in (first, second)]
    return keys[0].key == keys[1].key


def find_static_difference(first: PyTree, second: PyTree) -> Difference | None:
    """The first difference between two trees, ignoring their arrays; `None` if they share a trace.

    The difference is a static leaf, or a node whose type, children or static fields differ.

    >>> import jax
    >>> from jax.tree_util import keystr
    >>> found = find_static_difference({"a": 1.0, "b": (2, 3)}, {"a": 1.0, "b": (2, True)})
    >>> keystr(found.path), found.first, found.second
    ("['b'][1]", 3, True)
    """
    structures = [flatten(tree, by_identity=True)[1] for tree in (first, second)]
    if structures[0] is structures[1]:
        return None
    children, others = children_with_keys(first), children_with_keys(second)
    if type(first) is type(second) and [key for key, _ in children] == [key for key, _ in others]:
        for (key, child), (_, other) in zip(children, others, strict=True):
            if found := find_static_difference(child, other):
                return found._replace(path=(key, *found.path))
    return Difference((), first, second)
