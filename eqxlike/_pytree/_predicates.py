"""Predicates for leaves: arrays, array-like values, frozen and unusable arrays; path patterns."""

import functools
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jaxtyping import PyTree

from .._compat import Tracer

ARRAY_TYPES = (jax.Array, np.ndarray, np.generic)
"""The types for which `is_array` is true, for `isinstance` in fast loops."""


def is_array(element: Any) -> bool:
    """`True` for a JAX array (tracers included), a NumPy array or a NumPy scalar.

    >>> import jax.numpy as jnp
    >>> is_array(jnp.ones(2)), is_array(np.float32(1)), is_array(1.0)
    (True, True, False)
    """
    return isinstance(element, ARRAY_TYPES)


def is_array_or_struct(leaf: Any) -> bool:
    """Whether `leaf` is an array (see `is_array`) or a `jax.ShapeDtypeStruct`.

    >>> is_array_or_struct(jax.ShapeDtypeStruct((2,), "float32")), is_array_or_struct(1.0)
    (True, False)
    """
    return is_array(leaf) or isinstance(leaf, jax.ShapeDtypeStruct)


def is_on_cpu(array: Any) -> bool:
    """Returns `True` if NumPy can read the array without a copy.

    This holds for a NumPy array, and for a JAX array on one CPU device.
    """
    if isinstance(array, Tracer) or not isinstance(array.dtype, np.dtype):
        return False
    if not isinstance(array, jax.Array):
        return True
    return len(array.devices()) == 1 and next(iter(array.devices())).platform == "cpu"


def is_array_like(element: Any) -> bool:
    """`True` for an array, a Python number, or an object with `__jax_array__`.

    >>> is_array_like(1.0), is_array_like("1.0")
    (True, False)
    """
    is_number = isinstance(element, bool | int | float | complex)
    return is_array(element) or is_number or _has_jax_array(element)


def is_inexact_array(element: Any) -> bool:
    """`True` for an array (see `is_array`) of floating-point or complex dtype.

    >>> import jax.numpy as jnp
    >>> is_inexact_array(jnp.ones(2)), is_inexact_array(jnp.arange(2)), is_inexact_array(1.0)
    (True, False, False)
    """
    return is_array(element) and bool(jnp.issubdtype(element.dtype, jnp.inexact))


def _has_jax_array(element: Any) -> bool:
    # A tracer has the attribute `__jax_array__` too, with the value `None`.
    return getattr(element, "__jax_array__", None) is not None


def is_inexact_array_like(element: Any) -> bool:
    """`True` for array-like values (see `is_array_like`) that are floating-point or complex.

    >>> is_inexact_array_like(1.0), is_inexact_array_like(1), is_inexact_array_like(1j)
    (True, False, True)
    """
    if not is_array(element) and _has_jax_array(element):
        element = element.__jax_array__()
    return is_inexact_array(element) or isinstance(element, float | complex)


# --- Frozen arrays, which are not trained: filters and gradients see each inside a `Frozen` ---


class Frozen:
    """A pytree node whose only child is a frozen array."""

    __slots__ = ("value",)

    def __init__(self, value: Any):
        self.value = value


jtu.register_pytree_with_keys(
    Frozen,
    # The path key is empty, so that paths are as in the user's tree.
    lambda node: ((("", node.value),), None),
    lambda _, children: Frozen(*children),
    lambda node: ((node.value,), None),
)


def is_frozen(node: Any) -> bool:
    return type(node) is Frozen


def past_marks(is_leaf: Callable[[Any], bool] | None) -> Callable[[Any], bool] | None:
    """Wraps `is_leaf` so that it is never called with a `Frozen`: users do not know this node."""
    return None if is_leaf is None else lambda node: not is_frozen(node) and is_leaf(node)


def flag_frozen(tree: PyTree, is_leaf: Callable[[Any], bool] | None = None) -> list[bool]:
    """A list with one flag for each leaf of `tree`: `True` if the leaf is frozen."""

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
    """A tree like `tree`, with `True` for each frozen leaf; `None` if no leaf is frozen."""
    flags = flag_frozen(tree)
    return jtu.tree_structure(tree).unflatten(flags) if any(flags) else None


def flag_leaves(
    tree: PyTree,
    leaves: list[Any],
    predicate: Callable[[Any], Any],
    is_leaf: Callable[[Any], bool] | None = None,
) -> list[bool]:
    """The result of `predicate` for each of the `leaves` of `tree`.

    `filter` documents the rule for frozen arrays.
    """
    return flag_each(leaves, flag_frozen(tree, is_leaf), predicate)


def flag_each(leaves: list[Any], frozen: list[Any], predicate: Callable[[Any], Any]) -> list[bool]:
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


# --- Mutable arrays, `jax.Ref`: filters do not treat them as arrays, but they are traced ---


def is_traced_reference(element: Any) -> bool:
    """`True` for a `jax.Ref` inside a traced function."""
    # The check for a `jax.Ref` comes last, because it takes the longest: a microsecond.
    return isinstance(element, Tracer) and not is_array(element) and isinstance(element, jax.Ref)


def is_reference(element: Any) -> bool:
    """`True` for a `jax.Ref`.

    >>> import jax.numpy as jnp
    >>> is_reference(jax.new_ref(jnp.ones(2))), is_reference(jnp.ones(2))
    (True, False)
    """
    return type(element) is jax.Ref or is_traced_reference(element)


def is_array_or_traced_reference(element: Any) -> bool:
    """`True` for an array, or for a `jax.Ref` inside a traced function."""
    return is_array(element) or is_traced_reference(element)


# --- Arrays that no call accepts: deleted arrays, and arrays without numbers ---


_MAX_PATHS = 8
"""The maximum number of paths that `listed` shows."""


def deleted_paths(tree: PyTree, name: str = "") -> list[str]:
    """The paths of the deleted arrays in `tree`, each starting with `name`."""
    return [
        f"{name}{jtu.keystr(path)}"
        for path, leaf in jtu.tree_leaves_with_path(tree)
        if isinstance(leaf, jax.Array) and not isinstance(leaf, Tracer) and leaf.is_deleted()
    ]


def paths_without_numbers(tree: PyTree, name: str = "") -> list[str]:
    """The paths of NumPy arrays of strings, objects or dates in `tree`, each with its dtype."""
    return [
        f"{name}{jtu.keystr(path)} ({leaf.dtype})"
        for path, leaf in jtu.tree_leaves_with_path(tree)
        # Kind "V" is not in this list, because JAX's own float types, such as bfloat16, have this
        # kind.
        if isinstance(leaf, np.ndarray | np.generic) and leaf.dtype.kind in "OSUMm"
    ]


def listed(paths: list[str]) -> str:
    """Joins the first few of `paths` into one text, which also counts the remaining paths."""
    more = f" and {len(paths) - _MAX_PATHS} more" if len(paths) > _MAX_PATHS else ""
    return ", ".join(paths[:_MAX_PATHS]) + more


# --- Patterns for paths of arrays in a tree ---


Which = str | Callable[[str, jax.ShapeDtypeStruct], bool]
"""A pattern such as `layers[*].weight`, or a function of path and leaf that returns a bool."""


def path_matches(which: Which, path: str, leaf: jax.ShapeDtypeStruct) -> bool:
    """Returns `True` if a pattern matches the array at a path.

    `*` matches one name or index. `**` matches any number of names and indices. `**.` before a name
    matches any number of parents, or none: `**.weight` matches `weight` and `layers[0].weight`. An
    index or a key may be written after a dot: `layers.0.weight` for `layers[0].weight`.
    """
    if callable(which):
        return bool(which(path, leaf))
    return bool(_regex(_dotted(which)).fullmatch(_dotted(path)))


def _dotted(path: str) -> str:
    return re.sub(r"\[['\"]?(.*?)['\"]?\]", r".\1", path).removeprefix(".")


@functools.lru_cache(maxsize=256)
def _regex(pattern: str) -> re.Pattern[str]:
    parts = re.split(r"(\*\*\.|\*\*|\*)", pattern)
    meanings = {"**.": r"(?:.*\.)?", "**": ".*", "*": r"[^.]*"}
    return re.compile("".join(meanings.get(part, re.escape(part)) for part in parts))
