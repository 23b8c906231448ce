"""Where arrays live: shardings given as prefixes of trees that have static leaves."""

from collections.abc import Callable
from typing import Any

import jax.tree_util as jtu
from jaxtyping import PyTree

from ._trace import is_array_or_struct


def shardings_of_arrays(
    name: str,
    prefix: PyTree,
    tree: PyTree,
    is_placed: Callable[[Any], bool] = is_array_or_struct,
) -> list[Any]:
    """The sharding, or `None`, for each array in `tree`, from a prefix of it.

    **Arguments:**

    - `name`: what the user calls `prefix`, for messages.
    - `is_placed`: which leaves are arrays.

    **Raises:** `ValueError` if `prefix` is not one.
    """
    if isinstance(prefix, tuple) and isinstance(tree, tuple) and name == "in_shardings":
        # Arguments that a call left out, their defaults filled in, stand where they like.
        prefix = (*prefix, *[None] * (len(tree) - len(prefix)))
    shardings: list[Any] = []

    def spread(sharding: Any, subtree: PyTree) -> None:
        shardings.extend(sharding for leaf in jtu.tree_leaves(subtree) if is_placed(leaf))

    try:
        jtu.tree_map(spread, prefix, tree, is_leaf=lambda node: node is None)
    except ValueError as error:
        raise ValueError(f"`{name}` is not a prefix of what it places: {error}") from None
    return shardings
