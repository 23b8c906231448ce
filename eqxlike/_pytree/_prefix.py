"""Mapping over a prefix and the trees it is a prefix of, with errors that say where it is not."""

from collections.abc import Callable, Sequence
from typing import Any

import jax.tree_util as jtu
from jaxtyping import PyTree

from ._difference import find_difference


def map_prefix(
    function: Callable[..., Any],
    *pytrees: PyTree,
    names: Sequence[str],
    advice: str,
    is_leaf: Callable[[Any], bool] | None = None,
) -> PyTree:
    """`jax.tree_util.tree_map`, but its error tells the trees apart.

    JAX's own calls all of them `tree_map tree`. `names` are those that the user knows them by, and
    `advice` ends the message.
    """

    def fits(prefix: Any, _: Any) -> bool | None:
        is_end = jtu.all_leaves([prefix]) or (is_leaf is not None and is_leaf(prefix))
        return True if is_end else None

    try:
        return jtu.tree_map(function, *pytrees, is_leaf=is_leaf)
    except ValueError:
        prefix, *others = pytrees
        for name, full in zip(names[1:], others, strict=True):
            if difference := find_difference(prefix, full, fits):
                explained = difference.explain(names[0], name)
                raise ValueError(f"pytree structure error: {explained}. {advice}") from None
        raise
