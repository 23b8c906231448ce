"""Hypothesis strategies for trees of Python containers, namedtuples and Modules."""

from typing import Any, NamedTuple

import jax.tree_util as jtu
from hypothesis import strategies as st

import eqxlike


class Point(NamedTuple):
    x: Any
    y: Any


class Pair(eqxlike.Module):
    first: Any
    second: Any
    name: str = eqxlike.field(static=True, default="pair")


def containers(trees: Any, max_size: int = 3) -> Any:
    """Containers of `trees`."""
    return (
        st.lists(trees, max_size=max_size)
        | st.lists(trees, max_size=max_size).map(tuple)
        | st.dictionaries(st.sampled_from("abc"[:max_size]), trees)
        | st.builds(Point, trees, trees)
        | st.builds(Pair, trees, trees, st.sampled_from(["pair", "couple"]))
    )


def trees_of(leaves: Any, max_leaves: int = 10, max_size: int = 3) -> Any:
    """Trees of `leaves`."""
    return st.recursive(leaves, lambda trees: containers(trees, max_size), max_leaves=max_leaves)


def follow(tree: Any, path: tuple[Any, ...]) -> Any:
    """The node of `tree` at a path."""
    for key in path:
        match key:
            case jtu.GetAttrKey(name):
                tree = getattr(tree, name)
            case jtu.SequenceKey(index):
                tree = tree[index]
            case jtu.DictKey(name):
                tree = tree[name]
    return tree
