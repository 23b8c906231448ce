"""Shardings for the arrays of trees that have static leaves, given as prefixes of them."""

from collections.abc import Callable
from typing import Any

import jax.tree_util as jtu
from jaxtyping import PyTree

from ..._pytree import is_reference
from .._trace import is_array_or_struct


def _is_traced(leaf: Any) -> bool:
    return is_array_or_struct(leaf) or is_reference(leaf)


def shardings_of_arrays(
    name: str,
    prefix: PyTree,
    tree: PyTree,
    is_placed: Callable[[Any], bool] = _is_traced,
) -> list[Any]:
    """The sharding, or `None`, for each array in `tree`, from a prefix of it.

    **Arguments:**

    - `name`: the name of `prefix` in messages.
    - `is_placed`: whether a leaf is an array.

    **Raises:** `ValueError` if `prefix` is no prefix of `tree`.
    """
    shardings: list[Any] = []

    def spread(sharding: Any, subtree: PyTree) -> None:
        shardings.extend(sharding for leaf in jtu.tree_leaves(subtree) if is_placed(leaf))

    try:
        jtu.tree_map(spread, prefix, tree, is_leaf=lambda node: node is None)
    except ValueError as error:
        raise ValueError(f"`{name}` is not a prefix of what it places: {error}") from None
    return shardings
