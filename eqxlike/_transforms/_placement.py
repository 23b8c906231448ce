"""Where arrays live: shardings given as prefixes of trees that have static leaves."""

from typing import Any

import jax
import jax.tree_util as jtu
from jaxtyping import PyTree

from .._pytree import is_array


def shardings_of_arrays(name: str, prefix: PyTree, tree: PyTree) -> list[Any]:
    """The sharding, or `None`, for each array in `tree`, from a prefix of it.

    **Raises:** `ValueError` if `prefix` is not one.
    """
    if isinstance(prefix, tuple) and isinstance(tree, tuple) and name == "in_shardings":
        # Arguments that a call left out, their defaults filled in, stand where they like.
        prefix = (*prefix, *[None] * (len(tree) - len(prefix)))
    shardings: list[Any] = []

    def spread(sharding: Any, subtree: PyTree) -> None:
        for leaf in jtu.tree_leaves(subtree):
            if is_array(leaf) or isinstance(leaf, jax.ShapeDtypeStruct):
                shardings.append(sharding)

    try:
        jtu.tree_map(spread, prefix, tree, is_leaf=lambda node: node is None)
    except ValueError as error:
        raise ValueError(f"`{name}` is not a prefix of what it places: {error}") from None
    return shardings
