"""Changed copies of a pytree: `filter`, `partition`, `combine`, `apply_updates`, `tree_at`."""

import dataclasses
import types
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax.tree_util as jtu
import numpy as np
from jaxtyping import PyTree

from ._difference import map_prefix, walk
from ._predicates import flag_each, frozen_mask, past_marks
from ._text import tree_pformat

Tree = TypeVar("Tree", bound=Any)
FilterSpec = bool | Callable[[Any], bool]

_OF_ARRAYS = {"jax", "jaxlib", "numpy", "jaxtyping", __name__.partition(".")[0]}
"""Packages whose classes are dtypes, arrays or layers, and so cannot be predicates."""


def _mask(
    filter_spec: PyTree[FilterSpec], pytree: PyTree, is_leaf: Callable[[Any], bool] | None
) -> PyTree[bool]:
    """Broadcasts the prefix `filter_spec` over `pytree`: one `bool` for each leaf."""
    is_leaf = past_marks(is_leaf)

    def spread(spec: FilterSpec, subtree: PyTree, frozen: PyTree[bool] = None) -> PyTree[bool]:
        if isinstance(spec, bool):
            return jtu.tree_map(lambda _: spec, subtree, is_leaf=is_leaf)
        package = spec.__module__.partition(".")[0] if isinstance(spec, type) else ""
        is_dtype_or_array = package in _OF_ARRAYS
        if callable(spec) and (not is_dtype_or_array or spec is np.bool_):
            leaves, treedef = jtu.tree_flatten(subtree, is_leaf=is_leaf)
            are_frozen = [] if frozen is None else treedef.flatten_up_to(frozen)
            return treedef.unflatten(flag_each(leaves, are_frozen, spec))
        path = next(path for path, leaf in jtu.tree_leaves_with_path(filter_spec) if leaf is spec)
        on_classes = (
            " A class or dtype is not a predicate: write `lambda leaf: isinstance(leaf, ...)`, or "
            "`lambda leaf: is_array(leaf) and leaf.dtype == ...`."
        )
        raise ValueError(
            "`filter_spec` must consist of booleans and callables only; it has a leaf "
            f"{spec!r} of type {type(spec).__name__} at filter_spec{jtu.keystr(path)}."
            + (on_classes if is_dtype_or_array or isinstance(spec, np.dtype | str) else "")
        )

    hint = (
        "`filter_spec` must be a prefix of `pytree`: it has the same nodes, but a `True`, a "
        "`False` or a function may replace a whole subtree."
    )
    if callable(filter_spec):
        hint += " A callable that is itself a pytree counts as a node: wrap it in a lambda."
    frozen = frozen_mask(pytree)
    pytrees = (pytree,) if frozen is None else (pytree, frozen)
    names = ("filter_spec", *("pytree" for _ in pytrees))
    return map_prefix(spread, filter_spec, *pytrees, names=names, hint=hint)


def filter(
    pytree: PyTree,
    filter_spec: PyTree[FilterSpec],
    inverse: bool = False,
    replace: Any = None,
    is_leaf: Callable[[Any], bool] | None = None,
) -> PyTree:
    """Keeps the leaves that `filter_spec` selects, and replaces the others by `replace`.

    **Arguments:**

    - `pytree`: any pytree.
    - `filter_spec`: a prefix of `pytree` whose leaves are `True` (keep the whole subtree), `False`
      (keep nothing) or a function from leaf to `bool`. A floating-point array that was frozen by
      `nn.freeze` is kept only if the function also accepts an array of integers in its place. So
      `is_inexact_array` skips frozen arrays, while `is_array` and `True` keep them.
    - `inverse`: replace the selected leaves, and keep the others.
    - `replace`: the replacement of a removed leaf.
    - `is_leaf`: as in `jax.tree_util.tree_map`, for `pytree`.

    **Returns:** a pytree of the same structure.

    **Raises:** `ValueError` if `filter_spec` has other leaves, or is not a prefix of `pytree`.

    >>> filter((1, "a", {"b": 2}), lambda leaf: isinstance(leaf, int))
    (1, None, {'b': 2})
    """
    keep = not inverse
    mask = _mask(filter_spec, pytree, is_leaf)
    return jtu.tree_map(lambda is_kept, leaf: leaf if is_kept is keep else replace, mask, pytree)


def partition(
    pytree: PyTree,
    filter_spec: PyTree[FilterSpec],
    replace: Any = None,
    is_leaf: Callable[[Any], bool] | None = None,
) -> tuple[PyTree, PyTree]:
    """Splits a pytree into the leaves that `filter_spec` selects and the others.

    `combine` joins the two parts again. The arguments and errors are the same as for `filter`.

    **Returns:** `(filter(...), filter(..., inverse=True))`.

    >>> partition((1, "a"), lambda leaf: isinstance(leaf, int))
    ((1, None), (None, 'a'))
    """
    mask = _mask(filter_spec, pytree, is_leaf)
    chosen = jtu.tree_map(lambda is_kept, leaf: leaf if is_kept else replace, mask, pytree)
    rest = jtu.tree_map(lambda is_kept, leaf: replace if is_kept else leaf, mask, pytree)
    return chosen, rest


def combine(*pytrees: Tree, is_leaf: Callable[[Any], bool] | None = None) -> Tree:
    """Joins pytrees of the same structure: each leaf is the first leaf that is not `None`.

    **Arguments:**

    - `*pytrees`: pytrees of the same structure; `None` marks a missing leaf.
    - `is_leaf`: as in `jax.tree_util.tree_map`; `None` is a leaf in any case.

    **Raises:** `ValueError` if the structures differ; `TypeError` if there are no pytrees.

    >>> combine((1, None), (None, "a"))
    (1, 'a')
    """
    if not pytrees:
        raise TypeError("`combine` expects at least one pytree, and was called with none.")

    def is_missing(node: Any) -> bool:
        return node is None or (is_leaf is not None and is_leaf(node))

    return map_prefix(
        lambda *leaves: next((leaf for leaf in leaves if leaf is not None), None),
        *pytrees,
        names=[f"pytrees[{index}]" for index in range(len(pytrees))],
        hint="`combine` joins pytrees of the same structure, with `None` for missing leaves.",
        is_leaf=is_missing,
    )


# --- Adding an optimiser's updates to a model ---


Model = TypeVar("Model")


def apply_updates(model: Model, updates: PyTree) -> Model:
    """Adds `updates` to `model`, leaf by leaf. A leaf whose update is `None` does not change.

    Arrays that were frozen by `nn.freeze` do not change either, whatever their update is.

    **Arguments:**

    - `model`: a pytree of parameters.
    - `updates`: a pytree of the same structure, as Optax returns it for filtered gradients.

    **Returns:** the new model. Updates are not cast; JAX's dtype promotion applies.

    **Raises:** `ValueError` if the structures differ.

    >>> apply_updates((1.0, "static"), (0.5, None))
    (1.5, 'static')
    """

    def add(update: Any, parameter: Any, frozen: PyTree[bool] = None) -> Any:
        if update is None or frozen is True:
            return parameter
        try:
            return parameter + update
        except Exception as error:
            path = next(path for path, node in walk(model) if node is parameter)
            error.add_note(f"The update of model{jtu.keystr(path)} could not be added.")
            raise

    frozen = frozen_mask(model)
    models = (model,) if frozen is None else (model, frozen)
    return map_prefix(
        add,
        updates,
        *models,
        names=("updates", *("model" for _ in models)),
        hint="`updates` must have the structure of `model`, with `None` for parts that stay.",
        is_leaf=lambda node: node is None,
    )


# --- Replacing nodes of a tree ---


class _Missing:
    """The class of `MISSING`, with a readable `repr` for signatures."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "<missing>"


MISSING: Any = _Missing()
"""The default of an optional parameter for which `None` is an ordinary value."""


def tree_at(
    where: Callable[[Tree], Any | Sequence[Any]],
    pytree: Tree,
    replace: Any | Sequence[Any] = MISSING,
    replace_fn: Callable[[Any], Any] = MISSING,
    is_leaf: Callable[[Any], bool] | None = None,
) -> Tree:
    """Returns a copy of `pytree` in which one or several nodes are replaced.

    **Arguments:**

    - `where`: a function that takes the pytree and returns the node to replace, or a tuple or list
      of nodes. It is called on a copy of the tree in which each leaf is a unique placeholder. So it
      may use indices and attributes, but may not compute with leaves or change the tree.
    - `pytree`: any pytree.
    - `replace`: the new node, or a sequence of new nodes if `where` returns a tuple or list. If
      `where` returns a node twice, its last replacement is used.
    - `replace_fn`: a function that takes the old node and returns the new one. Pass it instead of
      `replace`.
    - `is_leaf`: as in `jax.tree_util.tree_flatten`. To replace one of several `None`s, pass
      `is_leaf=lambda node: node is None`.

    **Returns:** a pytree with the replacements; everything else is shared with `pytree`.

    **Raises:**

    - `ValueError` if a node that `where` returns occurs more than once in the tree, is inside
      another returned node, or is a new container of nodes.
    - `ValueError` if `where` changes the tree, or depends on its leaves.
    - `ValueError` if `replace` and the result of `where` have different lengths.
    - `ValueError` unless exactly one of `replace` and `replace_fn` is passed.
    - `TypeError` if `where` is not a function, or returns an object that is not part of the tree,
      such as the value of a static field.

    >>> tree_at(lambda tree: tree["a"][0], {"a": [1, 2], "b": 3}, 10)
    {'a': [10, 2], 'b': 3}
    >>> tree_at(lambda tree: (tree["a"], tree["b"]), {"a": 1, "b": 3}, replace_fn=str)
    {'a': '1', 'b': '3'}
    """
    # If `pytree` is a function and `where` is not, the user has swapped the two arguments.
    is_swapped = isinstance(pytree, types.FunctionType) and not isinstance(
        where, types.FunctionType
    )
    if is_swapped or not callable(where):
        raise TypeError(
            "`where` must be a function from the tree to the node to replace, such as `lambda "
            f"tree: tree.weight`, and is the first argument; got {tree_pformat(where)}."
        )
    if (replace is MISSING) == (replace_fn is MISSING):
        raise ValueError("Precisely one of `replace` and `replace_fn` must be specified.")

    def is_leaf_or_empty(node: Any) -> bool:
        return _is_empty(node) or (is_leaf is not None and is_leaf(node))

    # The nodes that `where` returns are found by identity. Python shares equal numbers and has a
    # single `()`, so `where` is called on a copy in which every node is a unique object. A second
    # call, on the leaves themselves, checks that the result does not depend on their values.
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
    # `where` is called a second time on this copy, so that `where` cannot change the user's tree.
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
    """Stands for one leaf in the tree on which `where` is called. Each placeholder is unique."""

    __slots__ = ("path", "value")

    def __init__(self, path: str, value: Any):
        self.path = path
        self.value = value

    def __repr__(self) -> str:
        return f"<leaf{self.path}>"

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"`where` read the attribute {name!r} of the leaf at tree{self.path}: in `tree_at`, "
            "`where` may select a node, but not look inside a leaf."
        )


class _EmptyPlaceholder(tuple):
    """Stands for one `()` in the tree. All `()` are one object, but placeholders are distinct."""

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
    """Calls `where` on a tree of placeholders, and checks that it does not change the tree."""
    before = _identity(tree)
    try:
        chosen = where(tree)
    except TypeError as error:
        if _Placeholder.__name__ in str(error):
            error.add_note(
                f"In `tree_at`, `where` is called on a tree in which a {_Placeholder.__name__} "
                "stands for each leaf: `where` may select a node, but not compute with a leaf, "
                "index it or call it."
            )
        raise
    if _identity(tree) != before:
        raise ValueError(
            "`where` must not change the pytree on which it is called, but it did. It should only "
            "return the node to replace, or a tuple or list of nodes. Pass the new node as "
            "`replace`."
        )
    return chosen


def _identity(tree: PyTree) -> tuple[int, list[int]]:
    """A fingerprint of a tree of placeholders; it changes when something is added or removed."""
    leaves, treedef = jtu.tree_flatten(tree)
    return treedef.num_nodes, [id(leaf) for leaf in leaves if is_placeholder(leaf)]


def _count_occurrences(tree: PyTree, nodes: list[Any]) -> dict[int, int]:
    """Counts the occurrences of each of `nodes` in `tree`; the keys of the result are `id`s.

    Occurrences inside another node of `nodes` are not counted.
    """
    counts = {id(node): 0 for node in nodes}
    for leaf in jtu.tree_leaves(tree, is_leaf=lambda node: id(node) in counts):
        if id(leaf) in counts:
            counts[id(leaf)] += 1
    return counts


def _not_one_node(tree: PyTree, chosen: Any, node: Any, count: int) -> Exception:
    """The error if a `node` that `where` returned does not occur exactly once in `tree`."""
    paths = [jtu.keystr(path) for path, each in walk(tree) if each is node]
    if count > 1:
        argument = "is_leaf=lambda node: node is None" if node is None else "is_leaf"
        return ValueError(
            f"`where` does not uniquely identify a single element of `pytree`: {node!r} occurs "
            f"{count} times, at tree{' and tree'.join(paths)}. Pass `{argument}` to make each of "
            "them a separate leaf."
        )
    if paths:
        return ValueError(
            "`where` does not specify an element or elements of `pytree`: the node at "
            f"tree{paths[0]} is inside another node that `where` returned."
        )
    for value in (chosen, node):
        if owner := _owner_of_static(tree, value):
            return TypeError(
                f"`where` returned {value!r}, the value of {owner}. A static field is part of the "
                "tree's structure, not a node, so `tree_at` cannot replace it; use "
                "`dataclasses.replace`."
            )
    # If `node` is a leaf, it is not flattened, because JAX warns about leaves that are iterators.
    leaves = [] if jtu.all_leaves([node]) else jtu.tree_leaves(node)
    if leaves and all(map(is_placeholder, leaves)):
        return ValueError(
            f"`where` does not specify an element or elements of `pytree`: it returned {node!r} "
            f"of type {type(node).__name__}, which contains nodes of the tree, but is not a node "
            "itself. It should return a node, or a tuple or list of nodes."
        )
    return TypeError(
        f"`where` returned {node!r} of type {type(node).__name__}, which is not a node of the "
        "pytree. It should return a node, or a tuple or list of nodes: not a new object, nor the "
        "value of a static field."
    )


def _owner_of_static(tree: PyTree, value: Any) -> str | None:
    """Describes the static field that holds `value`; `None` if no static field holds it."""
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
    """Raises an error if `where` does not return the nodes `old` when called on the real leaves."""
    try:
        chosen = where(pytree)
    except Exception as error:
        error.add_note(
            "`tree_at` calls `where` a second time, on the leaves themselves, to check that it "
            "does not depend on their values. The first call, on placeholders, raised no error."
        )
        raise
    # It makes no difference if one call returns a tuple of nodes and the other call a list.
    chosen = [chosen] if is_single else list(chosen) if isinstance(chosen, tuple) else chosen
    leaves, treedef = jtu.tree_flatten(old)
    leaves_by_value, treedef_by_value = jtu.tree_flatten(chosen)
    if treedef != treedef_by_value or [*map(id, leaves)] != [*map(id, leaves_by_value)]:
        raise ValueError(
            "`where` must not depend on the leaves of the pytree, neither on their values nor on "
            "their types. It returned different nodes when called on the leaves themselves."
        )


def _one_for_each(replace: Any, num_nodes: int) -> list[Any]:
    try:
        replacements = list(replace)
    except TypeError:
        raise TypeError(
            f"`where` returned {num_nodes} nodes, so `replace` must be a sequence of {num_nodes} "
            f"nodes; it is of type {type(replace).__name__}."
        ) from None
    if len(replacements) != num_nodes:
        raise ValueError(
            "`where` must return a sequence of leaves of the same length as `replace`: it "
            f"returned {num_nodes}, and `replace` has {len(replacements)}."
        )
    return replacements
