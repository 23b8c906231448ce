"""Arrays that are not to be trained: a node around each, that filters and gradients see."""

from collections.abc import Callable
from typing import Any

import jax.tree_util as jtu
from jaxtyping import PyTree


class Frozen:
    """Stands in a tree around what is frozen; a pytree of that one child."""

    __slots__ = ("value",)

    def __init__(self, value: Any):
        self.value = value


class _InFrozen:
    """The key from a `Frozen` to its child: nothing, so that paths are those of the user's tree."""

    def __str__(self) -> str:
        return ""

    def __eq__(self, other: object) -> bool:
        return type(other) is _InFrozen

    def __hash__(self) -> int:
        return 0


jtu.register_pytree_with_keys(
    Frozen,
    lambda node: (((_InFrozen(), node.value),), None),
    lambda _, children: Frozen(*children),
    lambda node: ((node.value,), None),
)


def is_frozen(node: Any) -> bool:
    return type(node) is Frozen


def past_marks(is_leaf: Callable[[Any], bool] | None) -> Callable[[Any], bool] | None:
    """`is_leaf`, but never asked of a `Frozen`, which is no node of the user's tree."""
    return None if is_leaf is None else lambda node: not is_frozen(node) and is_leaf(node)


def flag_frozen(tree: PyTree, is_leaf: Callable[[Any], bool] | None = None) -> list[bool]:
    """A flag for each leaf of `tree`: whether it is frozen."""

    def is_end(node: Any) -> bool:
        return is_frozen(node) or (is_leaf is not None and is_leaf(node))

    nodes = jtu.tree_leaves(tree, is_leaf=is_frozen if is_leaf is None else is_end)
    if Frozen not in set(map(type, nodes)):
        return [False] * len(nodes)
    flags: list[bool] = []
    for node in nodes:
        num_leaves = len(jtu.tree_leaves(node, is_leaf=is_leaf)) if is_frozen(node) else 1
        flags += [is_frozen(node)] * num_leaves
    return flags


def frozen_mask(tree: PyTree) -> PyTree[bool] | None:
    """A tree like `tree` that has `True` where it is frozen; `None` if nothing is."""
    flags = flag_frozen(tree)
    return jtu.tree_structure(tree).unflatten(flags) if any(flags) else None
