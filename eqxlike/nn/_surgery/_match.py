"""Nodes of a model chosen by their type, or by a function."""

import types
from collections.abc import Callable
from typing import Any

from ..._pytree import is_frozen

Match = type | types.UnionType | tuple[type, ...] | Callable[[Any], Any]
"""A type, several, or a function from a node of the tree to `bool`."""


def node_predicate(match: Match, name: str) -> Callable[[Any], bool]:
    """The function that says whether `match`, the argument `name`, chooses a node.

    The mark around a frozen array is no node of the user's tree, and never chosen.

    **Raises:** `TypeError` if `match` is neither type nor function.
    """
    node_types: Any = match if isinstance(match, tuple) else (match,)
    if all(isinstance(each, type | types.UnionType) for each in node_types):
        return lambda node: not is_frozen(node) and isinstance(node, node_types)
    if callable(match):
        return lambda node: not is_frozen(node) and bool(match(node))
    raise TypeError(
        f"`{name}` must be a type, a tuple of types, or a function from a node of the tree to a "
        f"bool; got {match!r}."
    )
