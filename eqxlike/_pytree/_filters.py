"""Filtering, splitting, joining and updating trees by their leaves."""

from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.tree_util as jtu
import numpy as np
from jax.tree_util import keystr
from jaxtyping import PyTree

from ._difference import map_prefix, walk
from ._predicates import flag_frozen, frozen_mask, is_inexact_array, past_marks

Tree = TypeVar("Tree", bound=Any)
FilterSpec = bool | Callable[[Any], bool]

_OF_ARRAYS = {"jax", "jaxlib", "numpy", "jaxtyping", __name__.partition(".")[0]}
"""Packages whose classes are dtypes, arrays or layers, and so cannot be predicates."""


def flag_leaves(
    tree: PyTree,
    leaves: list[Any],
    predicate: Callable[[Any], Any],
    is_leaf: Callable[[Any], bool] | None = None,
) -> list[bool]:
    """The result of `predicate` for each of the `leaves` of `tree`.

    `filter` documents the rule for frozen arrays.
    """
    return _flag(leaves, flag_frozen(tree, is_leaf), predicate)


def _flag(leaves: list[Any], frozen: list[Any], predicate: Callable[[Any], Any]) -> list[bool]:
    """The result of `predicate` for each of the `leaves`.

    `frozen` has a flag for each leaf. A frozen floating-point array is selected only if `predicate`
    also accepts an array of integers in its place.
    """
    flags = [bool(predicate(leaf)) for leaf in leaves]
    asked = [
        place
        for place, is_frozen in enumerate(frozen)
        if is_frozen is True and flags[place] and is_inexact_array(leaves[place])
    ]
    if asked:
        answers = _ask_of_integers(predicate, [leaves[place] for place in asked])
        for place, answer in zip(asked, answers, strict=True):
            flags[place] = answer
    return flags


def _ask_of_integers(predicate: Callable[[Any], Any], arrays: list[Any]) -> list[bool]:
    """For each array, the result of `predicate` if an integer array replaces the array."""
    answers: list[bool] = []

    def ask(*traced: Any) -> tuple[()]:
        for array, integers in zip(arrays, traced, strict=True):
            if not isinstance(array, jax.Array):
                # Broadcasting a number makes an array of any shape without using memory.
                integers = np.broadcast_to(np.int32(0), array.shape)
                integers = integers if isinstance(array, np.ndarray) else integers[()]
            answers.append(bool(predicate(integers)))
        return ()

    # `eval_shape` passes tracers, which count as JAX arrays, and computes nothing.
    structs = [jax.ShapeDtypeStruct(array.shape, np.int32) for array in arrays]
    try:
        jax.eval_shape(ask, *structs)
    except Exception as error:
        error.add_note(
            "`filter_spec` was called with an array of integers instead of a frozen array, to find "
            "out whether `filter_spec` selects only trained arrays. It may use the type, shape and "
            "dtype of an array, but not its values."
        )
        raise
    return answers


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
            return treedef.unflatten(_flag(leaves, are_frozen, spec))
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
            error.add_note(f"The update of model{keystr(path)} could not be added.")
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
