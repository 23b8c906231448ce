"""Out-of-place updates of a pytree."""

from collections.abc import Callable, Sequence
from typing import Any

import jax.tree_util as jtu
from jaxtyping import PyTree

_missing: Any = object()


class _Placeholder:
    """Stands for one leaf while `where` walks the tree: unlike leaves, no two are the same."""

    __slots__ = ("path", "value")

    def __init__(self, path: str, value: Any):
        self.path = path
        self.value = value

    def __repr__(self) -> str:
        return f"<leaf{self.path}>"

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"`where` asked the leaf at tree{self.path} for {name!r}: in `tree_at`, `where` may "
            "walk down to a node, but not look inside a leaf."
        )


class _EmptyPlaceholder(tuple):
    """Stands for one `()`: Python has a single empty tuple, so that two could not be told apart."""

    value = ()


def _hold_place(path: tuple, leaf: Any) -> Any:
    is_empty_tuple = type(leaf) is tuple and not leaf
    return _EmptyPlaceholder() if is_empty_tuple else _Placeholder(jtu.keystr(path), leaf)


def _value(node: Any) -> Any:
    return node.value if type(node) in (_Placeholder, _EmptyPlaceholder) else node


def tree_at(
    where: Callable[[PyTree], Any | Sequence[Any]],
    pytree: PyTree,
    replace: Any | Sequence[Any] = _missing,
    replace_fn: Callable[[Any], Any] = _missing,
    is_leaf: Callable[[Any], bool] | None = None,
) -> PyTree:
    """A copy of `pytree` with one node, or several, replaced.

    **Arguments:**

    - `where`: a function from a pytree to the node to replace, or to a tuple or list of nodes. It
        is called on a tree in which unique placeholders stand for the leaves: it may index and
        take attributes, not calculate.
    - `pytree`: any pytree.
    - `replace`: what to put there; a sequence of the same length if `where` returned one.
    - `replace_fn`: instead of `replace`, a function from the old node to the new.
    - `is_leaf`: as in `jax.tree_util.tree_flatten`; needed to tell one `None` from another.

    **Returns:** a pytree with the replacements; everything else is shared with `pytree`.

    **Raises:** `ValueError` if `where` returns what is not one node of the tree, if the lengths
    differ, or if not precisely one of `replace` and `replace_fn` is given; `TypeError` if `where`
    returns what is no node at all.

    >>> tree_at(lambda tree: tree["a"][0], {"a": [1, 2], "b": 3}, 10)
    {'a': [10, 2], 'b': 3}
    >>> tree_at(lambda tree: (tree["a"], tree["b"]), {"a": 1, "b": 3}, replace_fn=str)
    {'a': '1', 'b': '3'}
    """
    if (replace is _missing) == (replace_fn is _missing):
        raise ValueError("Precisely one of `replace` and `replace_fn` must be specified.")

    def is_leaf_or_empty(node: Any) -> bool:
        return (type(node) is tuple and not node) or (is_leaf is not None and is_leaf(node))

    paths_and_leaves, treedef = jtu.tree_flatten_with_path(pytree, is_leaf=is_leaf_or_empty)
    placeholders = [_hold_place(path, leaf) for path, leaf in paths_and_leaves]
    tree = treedef.unflatten(placeholders)
    chosen = where(tree)

    occurrences = _count_occurrences(tree, [chosen])
    if occurrences[id(chosen)]:
        nodes, replacements = [chosen], [replace]
    elif isinstance(chosen, tuple | list):
        nodes = list(chosen)
        occurrences = _count_occurrences(tree, nodes)
        replacements = _replacements(replace, len(nodes))
    else:
        raise TypeError(
            f"`where` returned {chosen!r} of type {type(chosen).__name__}, which is not a node of "
            "the pytree. It should return a node, or a tuple or list of nodes."
        )
    for node in nodes:
        _check_unique(node, occurrences[id(node)])

    def without_placeholders(node: Any) -> Any:
        return jtu.tree_map(_value, node, is_leaf=is_leaf_or_empty)

    old = [without_placeholders(node) for node in nodes]
    chosen_by_value = where(pytree)
    _check_independent(old, [chosen_by_value] if nodes[:1] == [chosen] else chosen_by_value)

    if replace is _missing:
        replacements = [replace_fn(node) for node in old]
    new = {id(node): value for node, value in zip(nodes, replacements, strict=True)}
    leaves, treedef = jtu.tree_flatten(tree, is_leaf=lambda node: id(node) in new)
    return treedef.unflatten(
        [new[id(leaf)] if id(leaf) in new else _value(leaf) for leaf in leaves]
    )


def _count_occurrences(tree: PyTree, nodes: list[Any]) -> dict[int, int]:
    """How often each of `nodes` stands in `tree`, by identity; nodes inside others count nought."""
    counts = {id(node): 0 for node in nodes}
    for leaf in jtu.tree_leaves(tree, is_leaf=lambda node: id(node) in counts):
        if id(leaf) in counts:
            counts[id(leaf)] += 1
    return counts


def _replacements(replace: Any, num_nodes: int) -> list[Any]:
    if replace is _missing:
        return []
    try:
        replacements = list(replace)
    except TypeError:
        raise ValueError(
            f"`where` returned {num_nodes} nodes, so `replace` must be a sequence of as many; it "
            f"is of type {type(replace).__name__}."
        ) from None
    if len(replacements) != num_nodes:
        raise ValueError(
            "`where` must return a sequence of leaves of the same length as `replace`: it "
            f"returned {num_nodes}, and `replace` has {len(replacements)}."
        )
    return replacements


def _check_independent(old: list[Any], chosen_by_value: Any) -> None:
    """Raises if `where` chose other nodes in the tree itself than among placeholders."""
    leaves, treedef = jtu.tree_flatten(old)
    leaves_by_value, treedef_by_value = jtu.tree_flatten(list(chosen_by_value))
    is_same = treedef == treedef_by_value and [*map(id, leaves)] == [*map(id, leaves_by_value)]
    if not is_same:
        raise ValueError(
            "`where` must not depend on the leaves of the pytree: not on their value, nor on "
            "their type. It chose other nodes when called with the leaves themselves."
        )


def _check_unique(node: Any, count: int) -> None:
    if count == 1:
        return
    if count == 0 and not isinstance(node, _Placeholder) and jtu.all_leaves([node]):
        raise TypeError(
            f"`where` returned {node!r} of type {type(node).__name__}, which is not a node of the "
            "pytree. It should return a node, or a tuple or list of nodes."
        )
    if count == 0:
        raise ValueError(
            f"`where` does not specify an element or elements of `pytree`: it returned {node!r} "
            f"of type {type(node).__name__}, which is not in the tree, or is inside another node "
            "that it returned."
        )
    raise ValueError(
        f"`where` does not uniquely identify a single element of `pytree`: {node!r} stands in it "
        f"{count} times. For `None`, pass `is_leaf=lambda node: node is None`."
    )
