"""Which leaves: predicates over leaves, and trees split and joined by them."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jaxtyping import PyTree

from ._frozen import Frozen, flag_frozen
from ._prefix import map_prefix

AxisSpec = bool | Callable[[Any], bool]


def is_array(element: Any) -> bool:
    """`True` for a JAX array (tracers included), a NumPy array or a NumPy scalar.

    >>> import jax.numpy as jnp
    >>> is_array(jnp.ones(2)), is_array(np.float32(1)), is_array(1.0)
    (True, True, False)
    """
    return isinstance(element, jax.Array | np.ndarray | np.generic)


def is_array_like(element: Any) -> bool:
    """`True` for an array, a Python number, or what has `__jax_array__`.

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
    # A tracer has the attribute too, as `None`.
    return getattr(element, "__jax_array__", None) is not None


def is_inexact_array_like(element: Any) -> bool:
    """`True` for what is array-like (see `is_array_like`) and floating-point or complex.

    >>> is_inexact_array_like(1.0), is_inexact_array_like(1), is_inexact_array_like(1j)
    (True, False, True)
    """
    if not is_array(element) and _has_jax_array(element):
        element = element.__jax_array__()
    return is_inexact_array(element) or isinstance(element, float | complex)


_ASK_WHAT_IS_TRAINED = (is_inexact_array, is_inexact_array_like)


def flag_leaves(
    tree: PyTree,
    leaves: list[Any],
    predicate: Callable[[Any], Any],
    is_leaf: Callable[[Any], bool] | None = None,
) -> list[bool]:
    """What `predicate` says of each of `leaves`, those of `tree`.

    Who asks for the floating-point arrays wants what is trained: those that are frozen are not.
    """
    flags = [bool(predicate(leaf)) for leaf in leaves]
    if Frozen.exist and predicate in _ASK_WHAT_IS_TRAINED:
        frozen = flag_frozen(tree, is_leaf)
        flags = [flag and not is_frozen for flag, is_frozen in zip(flags, frozen, strict=True)]
    return flags


def _mask(
    filter_spec: PyTree[AxisSpec], pytree: PyTree, is_leaf: Callable[[Any], bool] | None
) -> PyTree[bool]:
    """Spreads the prefix `filter_spec` over `pytree`: one `bool` for each leaf."""

    def spread(spec: AxisSpec, subtree: PyTree) -> PyTree[bool]:
        if isinstance(spec, bool):
            return jtu.tree_map(lambda _: spec, subtree, is_leaf=is_leaf)
        if callable(spec):
            leaves, treedef = jtu.tree_flatten(subtree, is_leaf=is_leaf)
            return treedef.unflatten(flag_leaves(subtree, leaves, spec, is_leaf))
        path = next(path for path, leaf in jtu.tree_leaves_with_path(filter_spec) if leaf is spec)
        raise ValueError(
            "`filter_spec` must consist of booleans and callables only; it has a leaf "
            f"{spec!r} of type {type(spec).__name__} at filter_spec{jtu.keystr(path)}."
        )

    advice = (
        "`filter_spec` must be a prefix of `pytree`: the same nodes, down to a `True`, a `False` "
        "or a function for all that lies below."
    )
    if callable(filter_spec):
        advice += " A callable that is itself a pytree counts as a node: wrap it in a lambda."
    names = ("filter_spec", "pytree")
    return map_prefix(spread, filter_spec, pytree, names=names, advice=advice)


def filter(
    pytree: PyTree,
    filter_spec: PyTree[AxisSpec],
    inverse: bool = False,
    replace: Any = None,
    is_leaf: Callable[[Any], bool] | None = None,
) -> PyTree:
    """Keeps the leaves that `filter_spec` names and puts `replace` where the others were.

    **Arguments:**

    - `pytree`: any pytree.
    - `filter_spec`: a prefix of `pytree` whose leaves are `True` (keep all below), `False` (keep
        none) or a function from leaf to `bool`.
    - `inverse`: keep what would be replaced, and the other way round.
    - `replace`: what stands where a leaf was taken away.
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
    filter_spec: PyTree[AxisSpec],
    replace: Any = None,
    is_leaf: Callable[[Any], bool] | None = None,
) -> tuple[PyTree, PyTree]:
    """`filter` and its inverse in one: `combine` joins the two again.

    Arguments and errors are those of `filter`.

    >>> partition((1, "a"), lambda leaf: isinstance(leaf, int))
    ((1, None), (None, 'a'))
    """
    mask = _mask(filter_spec, pytree, is_leaf)
    chosen = jtu.tree_map(lambda is_kept, leaf: leaf if is_kept else replace, mask, pytree)
    rest = jtu.tree_map(lambda is_kept, leaf: replace if is_kept else leaf, mask, pytree)
    return chosen, rest


def combine(*pytrees: PyTree, is_leaf: Callable[[Any], bool] | None = None) -> PyTree:
    """Joins pytrees of one structure: each leaf is the first that is not `None`.

    **Arguments:**

    - `*pytrees`: pytrees of the same structure, `None` standing for a missing leaf.
    - `is_leaf`: as in `jax.tree_util.tree_map`; `None` is a leaf in any case.

    **Raises:** `ValueError` if the structures differ, `TypeError` without any pytree.

    >>> combine((1, None), (None, "a"))
    (1, 'a')
    """
    if not pytrees:
        raise TypeError("`combine` expects at least one pytree, and was called with none.")
    if is_leaf is None:
        is_missing = _is_none
    else:

        def is_missing(node: Any) -> bool:
            return node is None or is_leaf(node)

    return map_prefix(
        _first_present,
        *pytrees,
        names=[f"pytrees[{index}]" for index in range(len(pytrees))],
        advice="`combine` joins pytrees of one structure, with `None` for what is missing.",
        is_leaf=is_missing,
    )


def _is_none(node: Any) -> bool:
    return node is None


def _first_present(*leaves: Any) -> Any:
    for leaf in leaves:
        if leaf is not None:
            return leaf
    return None
