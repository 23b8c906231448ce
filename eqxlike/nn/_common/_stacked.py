"""Layers of one form stored as one, each array with a leading axis."""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import jax.tree_util as jtu

from ..._pytree import combine, is_array, partition


def stack_layers(layers: Sequence[Any]) -> Any:
    """One layer with the arrays of all, stacked; what is no array is that of the first."""
    arrays, statics = zip(*(partition(layer, is_array) for layer in layers), strict=True)
    return combine(jtu.tree_map(lambda *each: jnp.stack(each), *arrays), statics[0])


def layer_at(stacked: Any, index: int) -> Any:
    """One of the layers that are stored stacked, or one of the outputs of all, by itself."""
    return jtu.tree_map(lambda leaf: leaf[index] if is_array(leaf) else leaf, stacked)
