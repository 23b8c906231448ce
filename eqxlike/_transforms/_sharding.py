"""Device placement and sharding constraints for the arrays of pytrees."""

import copy
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Self, TypeVar

import jax
import jax.tree_util as jtu
from jax.sharding import NamedSharding
from jaxtyping import PyTree

from .._compat import Tracer
from .._module import AbstractVar, Module, field, stored_fields
from .._partition import split
from .._pytree import is_array, is_reference
from ._flat_call import is_array_or_struct

Tree = TypeVar("Tree")


def filter_shard(x: Tree, device_or_shardings: PyTree[Any]) -> Tree:
    """Places the arrays of a tree on devices.

    Inside a compiled program, `filter_shard` constrains the sharding that XLA chooses, as
    `jax.lax.with_sharding_constraint` does. Outside a compiled program, it moves the arrays, as
    `jax.device_put` does.

    **Arguments:**

    - `x`: any pytree. Leaves other than arrays are unchanged; a NumPy array becomes a JAX array.
    - `device_or_shardings`: a device or a sharding for all arrays, or a prefix of `x` with devices
      and shardings as leaves. `None` leaves arrays unchanged. A `jax.sharding.PartitionSpec` refers
      to the mesh of `jax.set_mesh`.

    **Returns:** a copy of `x` with its arrays on the given devices.

    **Raises:** `ValueError` if `device_or_shardings` is not a prefix of `x`. If a sharding does not
    fit its array, JAX's own error, with a note that names the path of the array.

    !!! example

        >>> import eqxlike as eqx, jax, jax.numpy as jnp
        >>> mesh = jax.sharding.Mesh(jax.devices(), "batch")
        >>> by_row = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("batch"))
        >>> data = {"x": jnp.ones((jax.device_count(), 3)), "name": "training"}
        >>> data = eqx.filter_shard(data, by_row)
        >>> print(data["x"].sharding.spec, data["name"])
        P('batch',) training
    """
    arrays, rest = split(x)
    placements = shardings_of_arrays("device_or_shardings", device_or_shardings, x, is_array)
    placed = []
    for array, placement in zip(arrays, placements, strict=True):
        try:
            placed.append(_place(array, placement))
        except (TypeError, ValueError) as error:
            paths = [path for path, leaf in jtu.tree_leaves_with_path(x) if is_array(leaf)]
            error.add_note(f"This is the array at x{jtu.keystr(paths[len(placed)])}.")
            raise
    return rest.merge(placed)


def _place(array: Any, placement: Any) -> Any:
    if placement is None:
        return array
    if isinstance(placement, jax.Device):
        placement = jax.sharding.SingleDeviceSharding(placement)
    is_concrete = isinstance(array, jax.Array) and not isinstance(array, Tracer)
    if is_concrete and isinstance(placement, jax.sharding.Sharding):
        # A constraint alone does not move an array that is committed to other devices.
        array = jax.device_put(array, placement)
    return jax.lax.with_sharding_constraint(array, placement)


# --- Prefixes of shardings for trees that contain static leaves ---


def _is_traced(leaf: Any) -> bool:
    return is_array_or_struct(leaf) or is_reference(leaf)


def shardings_of_arrays(
    name: str, prefix: PyTree, tree: PyTree, is_placed: Callable[[Any], bool] = _is_traced
) -> list[Any]:
    """Broadcasts a prefix of shardings. Returns a sharding, or `None`, for each array in `tree`.

    **Arguments:**

    - `name`: the name of `prefix` in error messages.
    - `is_placed`: function that returns `True` for each leaf that counts as an array.

    **Raises:** `ValueError` if `prefix` is not a prefix of `tree`.
    """
    shardings: list[Any] = []

    def spread(sharding: Any, subtree: PyTree) -> None:
        shardings.extend(sharding for leaf in jtu.tree_leaves(subtree) if is_placed(leaf))

    try:
        jtu.tree_map(spread, prefix, tree, is_leaf=lambda node: node is None)
    except ValueError as error:
        raise ValueError(f"`{name}` is not a prefix of the tree that it shards: {error}") from None
    return shardings


# --- Stacked layers, which are all-gathered one at a time ---


class Gathering(NamedTuple):
    """The shardings of one array of a layer.

    - `num_axes`: the number of axes of the array in one layer, without the axis of layers.
    - `split`: the sharding before the all-gather.
    - `together`: the sharding after the all-gather.
    """

    num_axes: int
    split: NamedSharding
    together: NamedSharding


class Stacked(Module):
    """Base class of Modules that stack equal layers, and call them one at a time.

    Each array of `layers` has a leading axis of length `depth`, one index for each layer. `unroll`
    is the number of layers that are in use at the same time.
    """

    layers: AbstractVar[Any]
    depth: AbstractVar[int]
    unroll: AbstractVar[int]
    _gatherings: tuple[tuple[tuple[Any, ...], Gathering], ...] = field(
        static=True, default=(), init=False, repr=False
    )

    def gathering(self, gatherings: Mapping[tuple[Any, ...], Gathering]) -> Self:
        """Returns a copy that all-gathers each layer when the layer is used.

        **Arguments:**

        - `gatherings`: the shardings of each array, by its path in `layers`.
        """
        new = copy.copy(self)
        stored_fields(new)["_gatherings"] = tuple(gatherings.items())
        return new

    def gather(self, layer: Any) -> Any:
        """All-gathers one layer.

        Inside `jax.shard_map` the layer is returned unchanged: the model is replicated there.
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
        # The transpose of a sharding constraint is the same constraint. So this constraint also
        # applies to the gradient. Then the gradient of a layer is summed and split over the devices
        # before the gradient of the next layer is computed.
        leaf = jax.lax.with_sharding_constraint(leaf, split)
    elif not together.is_fully_replicated:
        # `jax.vmap` maps over the stack, so `together` does not match the axes of the array.
        return leaf
    return jax.lax.with_sharding_constraint(leaf, together)


def keep_all_but_gathered(primitive: Any, *_: Any, **__: Any) -> bool:
    """Policy for `filter_checkpoint` that saves all intermediate values except all-gathered arrays.

    If all-gathered arrays were saved for the backward pass, all layers would be in memory at once.
    """
    return primitive.name != "sharding_constraint"
