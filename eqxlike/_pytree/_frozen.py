"""Arrays that are not to be trained: a node around each, that filters and gradients see."""

from collections.abc import Callable
from typing import Any

import jax.tree_util as jtu
from jaxtyping import PyTree


class Frozen:
    """Stands in a tree around what is frozen; a pytree of that one child."""

    __slots__ = ("value",)
    exist = False
    """Whether there ever was one: else nobody need look for them."""

    def __init__(self, value: Any):
        self.value = value
        Frozen.exist = True


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


def flag_frozen(tree: PyTree, is_leaf: Callable[[Any], bool] | None = None) -> list[bool]:
    """For each leaf of `tree`, whether it is frozen."""

    def is_end(node: Any) -> bool:
        return is_frozen(node) or (is_leaf is not None and is_leaf(node))

    flags: list[bool] = []
    for node in jtu.tree_leaves(tree, is_leaf=is_end):
        num_leaves = len(jtu.tree_leaves(node, is_leaf=is_leaf)) if is_frozen(node) else 1
        flags += [is_frozen(node)] * num_leaves
    return flags
