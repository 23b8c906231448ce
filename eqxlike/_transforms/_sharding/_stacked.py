"""Layers that are stored stacked and used one at a time, and so can be brought together so."""

import copy
from collections.abc import Mapping
from typing import Any, NamedTuple, Self

import jax
import jax.tree_util as jtu
from jax.sharding import NamedSharding

from ..._module import AbstractVar, Module, field, stored_fields


class Gathering(NamedTuple):
    """How an array of one layer, of so many axes, lies before it is brought together and after."""

    num_axes: int
    split: NamedSharding
    together: NamedSharding


class Stacked(Module):
    """Base of Modules whose `layers` are stored stacked, and taken out one at a time.

    The arrays of `layers` have a leading axis of length `depth`, of which `unroll` are in use at
    once.
    """

    layers: AbstractVar[Any]
    depth: AbstractVar[int]
    unroll: AbstractVar[int]
    _gatherings: tuple[tuple[tuple[Any, ...], Gathering], ...] = field(
        static=True, default=(), init=False, repr=False
    )

    def gathering(self, gatherings: Mapping[tuple[Any, ...], Gathering]) -> Self:
        """A copy that brings each layer together as it takes it out, by the paths in `layers`."""
        new = copy.copy(self)
        stored_fields(new)["_gatherings"] = tuple(gatherings.items())
        return new

    @property
    def gathers(self) -> bool:
        """Whether layers are brought together as they are taken out."""
        return bool(self._gatherings)

    def gather(self, layer: Any) -> Any:
        """One layer, brought together.

        Inside `jax.shard_map` it is as it comes: a model that goes in there whole is together.
        """
        if not self._gatherings or jax.sharding.get_abstract_mesh().manual_axes:
            return layer
        gatherings = dict(self._gatherings)

        def placed(keys: Any, leaf: Any) -> Any:
            found = gatherings.get(keys)
            return leaf if found is None else _gather(leaf, found)

        return jtu.tree_map_with_path(placed, layer)


def _gather(leaf: Any, gathering: Gathering) -> Any:
    split, together = gathering.split, gathering.together
    if leaf.ndim == gathering.num_axes:
        # The transpose of a constraint is that constraint: the gradient of a layer is summed, and
        # each device keeps its part, before the next layer's is computed.
        leaf = jax.lax.with_sharding_constraint(leaf, split)
    elif not together.is_fully_replicated:
        # The stack is mapped over, and has its axes elsewhere.
        return leaf
    return jax.lax.with_sharding_constraint(leaf, together)


def keep_all_but_gathered(primitive: Any, *_: Any, **__: Any) -> bool:
    """The policy of a `filter_checkpoint` under which only what was brought together is so again.

    Kept for the backward pass, all layers would be together at once.
    """
    return primitive.name != "sharding_constraint"
