"""A tree in two parts, of which one can be a key."""

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax.tree_util as jtu
from jaxtyping import PyTree

from .._pytree import flag_leaves


def hashable_partition(
    pytree: PyTree, filter_fn: Callable[[Any], bool]
) -> tuple[tuple[Any, ...], Hashable]:
    """The leaves of a tree for which `filter_fn` holds, and the rest.

    **Returns:** `(dynamic_leaves, static)`: the leaves, with `None` in the places of the others;
    and a hashable object with the others and the structure of the tree.

    >>> dynamic_leaves, static = hashable_partition({"a": 1, "b": "x"}, lambda leaf: leaf == 1)
    >>> dynamic_leaves, hashable_combine(dynamic_leaves, static)
    ((1, None), {'a': 1, 'b': 'x'})
    """
    leaves, treedef = jtu.tree_flatten(pytree)
    flags = flag_leaves(pytree, leaves, filter_fn)
    dynamic = tuple(leaf if taken else None for leaf, taken in zip(leaves, flags, strict=True))
    static = tuple(None if taken else leaf for leaf, taken in zip(leaves, flags, strict=True))
    return dynamic, (static, treedef)


def hashable_combine(dynamic_leaves: Sequence[Any], static: Any) -> PyTree:
    """The tree that `hashable_partition` took apart."""
    leaves, treedef = static
    return treedef.unflatten(
        other if leaf is None else leaf for leaf, other in zip(dynamic_leaves, leaves, strict=True)
    )
