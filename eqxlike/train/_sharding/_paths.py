"""The arrays of a tree, with the paths that rules and errors know them by."""

from typing import Any

import jax
import jax.tree_util as jtu
from jaxtyping import PyTree

from ..._pytree import is_array

Keys = tuple[Any, ...]


def is_array_or_struct(leaf: Any) -> bool:
    """Whether a leaf has a place on devices, or stands for one that has."""
    return is_array(leaf) or isinstance(leaf, jax.ShapeDtypeStruct)


def arrays_by_keys(tree: PyTree) -> dict[Keys, jax.ShapeDtypeStruct]:
    """The shape and dtype of each array of a tree."""
    return {
        keys: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
        for keys, leaf in jtu.tree_leaves_with_path(tree)
        if is_array_or_struct(leaf)
    }


def name_of(keys: Keys) -> str:
    """A path as rules have it: `layers[0].weight`."""
    return jtu.keystr(keys).removeprefix(".")
