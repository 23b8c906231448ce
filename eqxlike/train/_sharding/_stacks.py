"""Which arrays of a model stand stacked, and are brought together one layer at a time."""

from typing import Any, NamedTuple

import jax.tree_util as jtu
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import PyTree

from ..._transforms import Gathering, Stacked
from ._paths import Keys, arrays_by_keys

LAYERS = jtu.GetAttrKey("layers")


class Stack(NamedTuple):
    """A `Stacked` in which an array stands.

    - `keys`: its path in the model.
    - `depth`: how many layers it has.
    - `num_at_once`: how many of these are in use at once.
    """

    keys: Keys
    depth: int
    num_at_once: int


def stacks_by_keys(model: PyTree) -> dict[Keys, Stack]:
    """The outermost stack for each array of a model whose leading axis is that of layers.

    It is not where the stack itself was mapped over, as in an ensemble.
    """
    stacks: dict[Keys, Stack] = {}
    for keys, node in jtu.tree_leaves_with_path(model, is_leaf=_is_stacked):
        if _is_stacked(node):
            stack = Stack(keys, node.depth, min(node.depth, node.unroll))
            for inner, leaf in arrays_by_keys(node.layers).items():
                if leaf.shape[:1] == (node.depth,):
                    stacks[*keys, LAYERS, *inner] = stack
    return stacks


def gathered_by_layer(model: PyTree, split: PyTree, together: PyTree) -> dict[Keys, Stack]:
    """The stack for each array that is brought together one layer at a time: those that are split
    along other axes than that of layers.
    """
    before, after = (dict(jtu.tree_leaves_with_path(each)) for each in (split, together))
    return {
        keys: stack
        for keys, stack in stacks_by_keys(model).items()
        if before[keys] != after[keys] and before[keys].spec[0] is None
    }


def gathering(model: PyTree, split: PyTree, together: PyTree) -> PyTree:
    """The model with stacks that bring their layers together."""
    stacks = gathered_by_layer(model, split, together)
    shapes = arrays_by_keys(model)
    before, after = (dict(jtu.tree_leaves_with_path(each)) for each in (split, together))

    def told(keys: Keys, node: Any) -> Any:
        start = len(keys) + 1
        gatherings = {
            each[start:]: Gathering(
                len(shapes[each].shape) - 1, _of_layer(before[each]), _of_layer(after[each])
            )
            for each, stack in stacks.items()
            if stack.keys == keys
        }
        return node.gathering(gatherings) if gatherings else node

    return jtu.tree_map_with_path(told, model, is_leaf=_is_stacked)


def _of_layer(sharding: NamedSharding) -> NamedSharding:
    entries = list(sharding.spec[1:])
    while entries and entries[-1] is None:
        # A stack that is mapped over has fewer axes to name.
        entries.pop()
    return NamedSharding(sharding.mesh, PartitionSpec(*entries))


def _is_stacked(node: Any) -> bool:
    return isinstance(node, Stacked)
