"""A pytree one level at a time, or every node of it with its path."""

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import jax.tree_util as jtu
from jaxtyping import PyTree


def tree_flatten_one_level(pytree: PyTree) -> tuple[list[PyTree], Any]:
    """The children of a node, and the treedef that makes it of them.

    **Arguments:**

    - `pytree`: any pytree.

    **Returns:** `(children, treedef)`, with `treedef.unflatten(children)` being the node again.
    The only child of a leaf is the leaf itself, as in `jax.tree_util.tree_flatten`.

    **Raises:** `ValueError` if the node is one of its own children.

    >>> tree_flatten_one_level({"a": 3, "b": (1, None)})
    ([3, (1, None)], PyTreeDef({'a': *, 'b': *}))
    >>> tree_flatten_one_level(4)
    ([4], PyTreeDef(*))
    """
    children, treedef = flatten_one_level_with_keys(pytree)
    if not children:
        return [pytree] * treedef.num_leaves, treedef
    for key, child in children:
        if child is pytree:
            raise ValueError(contains_itself(pytree, "pytree", (), (key,)))
    return [child for _, child in children], treedef


def flatten_one_level_with_keys(node: Any) -> tuple[list[tuple[Any, Any]], Any]:
    """The children of `node`, each with its key in a path, and the treedef of this one level.

    A leaf has no children, and a treedef that says that it is a leaf. A node may be its own child.
    """
    # Not JAX's function of that name: in jax 0.10.2 all fields of a namedtuple get one key.
    paths_and_children, treedef = jtu.tree_flatten_with_path(node, is_leaf=_is_below_root())
    return [(path[0], child) for path, child in paths_and_children if path], treedef


def children_with_keys(node: Any) -> list[tuple[Any, Any]]:
    """The children of `node`, each with its key in a path; none for a leaf."""
    return [] if jtu.all_leaves([node]) else flatten_one_level_with_keys(node)[0]


def _is_below_root() -> Callable[[Any], bool]:
    """An `is_leaf` for one flattening, in which JAX asks of the root first, then of its children.

    To compare each with the root instead would be an endless descent for a list that holds itself.
    """
    calls = itertools.count()
    return lambda _: next(calls) > 0


def walk(pytree: PyTree, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Every node of `pytree` with its path, leaves too, each before what is below it."""
    yield path, pytree
    for key, child in children_with_keys(pytree):
        yield from walk(child, (*path, key))


def contains_itself(node: Any, name: str, above: tuple[Any, ...], below: tuple[Any, ...]) -> str:
    """The message for a node at the path `above` in the tree `name` that is `below` once more."""
    return (
        f"A pytree must not contain itself: the {type(node).__name__} at {name}"
        f"{jtu.keystr(above)} is at {name}{jtu.keystr(below)} too, so that walking down the tree "
        "would never end. Put a copy, or something else, in one of the two places."
    )
