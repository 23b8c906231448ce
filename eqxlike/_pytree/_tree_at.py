"""Out-of-place updates of a pytree."""

import dataclasses
import types
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax.tree_util as jtu
from jaxtyping import PyTree

from ._difference import walk
from ._print import tree_pformat

Tree = TypeVar("Tree", bound=Any)


class _Missing:
    """The class of `MISSING`, which says in signatures what it means."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "<missing>"


MISSING: Any = _Missing()
"""The default of a parameter that has no value of its own to say "left out"."""


def tree_at(
    where: Callable[[Tree], Any | Sequence[Any]],
    pytree: Tree,
    replace: Any | Sequence[Any] = MISSING,
    replace_fn: Callable[[Any], Any] = MISSING,
    is_leaf: Callable[[Any], bool] | None = None,
) -> Tree:
    """A copy of `pytree` with one node, or several, replaced.

    **Arguments:**

    - `where`: a function from a pytree to the node to replace, or to a tuple or list of nodes. It
      is called on a tree of unique placeholders for the leaves: it may index and take attributes,
      but not calculate, and not change the tree.
    - `pytree`: any pytree.
    - `replace`: the replacement; a sequence of the same length if `where` returned one. If a
      node was returned twice, the last counts.
    - `replace_fn`: instead of `replace`, a function from the old node to the new.
    - `is_leaf`: as in `jax.tree_util.tree_flatten`; needed to distinguish one `None` from another.

    **Returns:** a pytree with the replacements; everything else is shared with `pytree`.

    **Raises:** `ValueError` if `where` returns anything but one node of the tree, changes the tree
    or depends on its leaves, if the lengths differ, or unless exactly one of `replace` and
    `replace_fn` is given; `TypeError` if `where` is not a function, or returns something that is
    not a node at all, such as the value of a static field.

    >>> tree_at(lambda tree: tree["a"][0], {"a": [1, 2], "b": 3}, 10)
    {'a': [10, 2], 'b': 3}
    >>> tree_at(lambda tree: (tree["a"], tree["b"]), {"a": 1, "b": 3}, replace_fn=str)
    {'a': '1', 'b': '3'}
    """
    # If the tree is a function and `where` is none, the two were swapped.
    is_swapped = isinstance(pytree, types.FunctionType) and not isinstance(
        where, types.FunctionType
    )
    if is_swapped or not callable(where):
        raise TypeError(
            "`where` must be a function from the tree to the node to replace, such as `lambda "
            f"tree: tree.weight`, and comes before the tree; got {tree_pformat(where)}."
        )
    if (replace is MISSING) == (replace_fn is MISSING):
        raise ValueError("Precisely one of `replace` and `replace_fn` must be specified.")

    def is_leaf_or_empty(node: Any) -> bool:
        return _is_empty(node) or (is_leaf is not None and is_leaf(node))

    # `where` may return any expression, so a node can only be found by its identity. Python shares
    # equal numbers and has a single `()`: so `where` is called on a copy in which every node is an
    # object of its own. A second call, on the leaves themselves, checks that `where` did not look
    # at their values.
    paths_and_leaves, treedef = jtu.tree_flatten_with_path(pytree, is_leaf=is_leaf_or_empty)
    tree = treedef.unflatten([_hold_place(path, leaf) for path, leaf in paths_and_leaves])
    chosen = _choose(where, tree)

    occurrences = _count_occurrences(tree, [chosen])
    is_single = occurrences[id(chosen)] > 0 or not isinstance(chosen, tuple | list)
    nodes = [chosen] if is_single else list(chosen)
    if not is_single:
        occurrences = _count_occurrences(tree, nodes)
    for node in nodes:
        if occurrences[id(node)] != 1:
            raise _not_one_node(tree, chosen, node, occurrences[id(node)])

    old = [jtu.tree_map(_value, node, is_leaf=is_leaf_or_empty) for node in nodes]
    # This is a copy too: changes to it do not reach the user's tree.
    copy = treedef.unflatten([leaf for _, leaf in paths_and_leaves])
    _check_independent(where, copy, old, is_single)

    if replace_fn is not MISSING:
        replacements = [replace_fn(node) for node in old]
    else:
        replacements = [replace] if is_single else _one_for_each(replace, len(nodes))
    new = {id(node): value for node, value in zip(nodes, replacements, strict=True)}
    leaves, treedef = jtu.tree_flatten(tree, is_leaf=lambda node: id(node) in new)
    return treedef.unflatten(
        [new[id(leaf)] if id(leaf) in new else _value(leaf) for leaf in leaves]
    )


class _Placeholder:
    """Represents one leaf while `where` walks the tree: unlike leaves, no two are the same."""

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
    """Represents one `()`: Python has a single empty tuple, so two could not be distinguished."""

    value = ()


def _hold_place(path: tuple, leaf: Any) -> Any:
    return _EmptyPlaceholder() if _is_empty(leaf) else _Placeholder(jtu.keystr(path), leaf)


def is_placeholder(node: Any) -> bool:
    return type(node) in (_Placeholder, _EmptyPlaceholder)


def _value(node: Any) -> Any:
    return node.value if is_placeholder(node) else node


def _is_empty(node: Any) -> bool:
    return type(node) is tuple and not node


def _choose(where: Callable[[PyTree], Any], tree: PyTree) -> Any:
    """`where(tree)`, for a tree of placeholders."""
    before = _identity(tree)
    try:
        chosen = where(tree)
    except TypeError as error:
        if _Placeholder.__name__ in str(error):
            error.add_note(
                f"In `tree_at`, `where` is called on a tree in which a {_Placeholder.__name__} "
                "stands for each leaf: it may walk down to a node, but not calculate with a leaf, "
                "index or call it."
            )
        raise
    if _identity(tree) != before:
        raise ValueError(
            "`where` must not change the pytree it is called on, and did: it should only return "
            "the node to replace, or a tuple or list of nodes. What to put there is for `replace`."
        )
    return chosen


def _identity(tree: PyTree) -> tuple[int, list[int]]:
    """A fingerprint of a tree of placeholders; it changes when something is added or removed."""
    leaves, treedef = jtu.tree_flatten(tree)
    return treedef.num_nodes, [id(leaf) for leaf in leaves if is_placeholder(leaf)]


def _count_occurrences(tree: PyTree, nodes: list[Any]) -> dict[int, int]:
    """How often each of `nodes` is in `tree`, by identity; not counting those inside of others."""
    counts = {id(node): 0 for node in nodes}
    for leaf in jtu.tree_leaves(tree, is_leaf=lambda node: id(node) in counts):
        if id(leaf) in counts:
            counts[id(leaf)] += 1
    return counts


def _not_one_node(tree: PyTree, chosen: Any, node: Any, count: int) -> Exception:
    """The error for a `node` that `where` returned, as `chosen` or in it, if it is not unique."""
    paths = [jtu.keystr(path) for path, each in walk(tree) if each is node]
    if count > 1:
        way_out = "is_leaf=lambda node: node is None" if node is None else "is_leaf"
        return ValueError(
            f"`where` does not uniquely identify a single element of `pytree`: {node!r} stands in "
            f"it {count} times, at tree{' and tree'.join(paths)}. Pass `{way_out}` to have each "
            "of them a leaf of its own."
        )
    if paths:
        return ValueError(
            "`where` does not specify an element or elements of `pytree`, each beside the others: "
            f"the node at tree{paths[0]} lies inside another one that it returned."
        )
    for value in (chosen, node):
        if owner := _owner_of_static(tree, value):
            return TypeError(
                f"`where` returned {value!r}, the value of {owner}. A static field is part of the "
                "tree's structure and no node, so `tree_at` cannot replace it; make a new Module, "
                "as `dataclasses.replace` does."
            )
    # A leaf is not flattened: JAX warns about leaves that are iterators.
    leaves = [] if jtu.all_leaves([node]) else jtu.tree_leaves(node)
    if leaves and all(map(is_placeholder, leaves)):
        return ValueError(
            f"`where` does not specify an element or elements of `pytree`: it returned {node!r} "
            f"of type {type(node).__name__}, which is made of nodes of the tree and none itself. "
            "It should return a node, or a tuple or list of nodes."
        )
    return TypeError(
        f"`where` returned {node!r} of type {type(node).__name__}, which is not a node of the "
        "pytree. It should return a node, or a tuple or list of nodes: not what it made itself, "
        "nor what stands in a static field."
    )


def _owner_of_static(tree: PyTree, value: Any) -> str | None:
    """Describes the static field that holds `value`, if there is one."""
    for path, node in walk(tree):
        for field in dataclasses.fields(node) if dataclasses.is_dataclass(node) else ():
            held = getattr(node, field.name, MISSING)
            if field.metadata.get("static") and held is value:
                owner = type(node).__name__
                return f"the static field `{field.name}` of the {owner} at tree{jtu.keystr(path)}"
    return None


def _check_independent(
    where: Callable[[PyTree], Any], pytree: PyTree, old: list[Any], is_single: bool
) -> None:
    """Raises if `where` selects other nodes in the pytree itself than among placeholders."""
    try:
        chosen = where(pytree)
    except Exception as error:
        error.add_note(
            "`tree_at` calls `where` a second time, on the leaves themselves, to see that it does "
            "not depend on them; the first call, on placeholders, was without error."
        )
        raise
    # A tuple of nodes in one call and a list in the other are the same selection.
    chosen = [chosen] if is_single else list(chosen) if isinstance(chosen, tuple) else chosen
    leaves, treedef = jtu.tree_flatten(old)
    leaves_by_value, treedef_by_value = jtu.tree_flatten(chosen)
    if treedef != treedef_by_value or [*map(id, leaves)] != [*map(id, leaves_by_value)]:
        raise ValueError(
            "`where` must not depend on the leaves of the pytree: not on their value, nor on "
            "their type. It chose other nodes when called with the leaves themselves."
        )


def _one_for_each(replace: Any, num_nodes: int) -> list[Any]:
    try:
        replacements = list(replace)
    except TypeError:
        raise TypeError(
            f"`where` returned {num_nodes} nodes, so `replace` must be a sequence of as many; it "
            f"is of type {type(replace).__name__}."
        ) from None
    if len(replacements) != num_nodes:
        raise ValueError(
            "`where` must return a sequence of leaves of the same length as `replace`: it "
            f"returned {num_nodes}, and `replace` has {len(replacements)}."
        )
    return replacements
