"""The placement of arrays, within compiled code and outside it."""

from typing import Any, TypeVar

import jax
import jax.tree_util as jtu
from jaxtyping import PyTree

from ..._compat import Tracer
from ..._partition import split
from ..._pytree import is_array
from ._prefix import shardings_of_arrays

Tree = TypeVar("Tree")


def filter_shard(x: Tree, device_or_shardings: PyTree[Any]) -> Tree:
    """Places the arrays of a tree on devices.

    Within compiled code this constrains how XLA lays them out, as
    `jax.lax.with_sharding_constraint` does; outside it moves them, as `jax.device_put` does.

    **Arguments:**

    - `x`: any pytree. What is no array is left as it is; a NumPy array becomes a JAX array.
    - `device_or_shardings`: a device or a sharding for all arrays, or a prefix of `x` with these as
      leaves, and `None` for arrays to be left alone. A `jax.sharding.PartitionSpec` refers to the
      mesh of `jax.set_mesh`.

    **Returns:** a tree like `x`, whose arrays are placed so.

    **Raises:** `ValueError` if `device_or_shardings` is not a prefix of `x`; JAX's own error for a
    sharding that does not fit its array, with a note that names the path.

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
            error.add_note(f"This is the array at {_path_of_array(x, len(placed))}.")
            raise
    return rest.merge(placed)


def _place(array: Any, placement: Any) -> Any:
    if placement is None:
        return array
    if isinstance(placement, jax.Device):
        placement = jax.sharding.SingleDeviceSharding(placement)
    is_concrete = isinstance(array, jax.Array) and not isinstance(array, Tracer)
    if is_concrete and isinstance(placement, jax.sharding.Sharding):
        # A constraint by itself does not move an array that is committed to other devices.
        array = jax.device_put(array, placement)
    return jax.lax.with_sharding_constraint(array, placement)


def _path_of_array(x: PyTree, place: int) -> str:
    paths = [path for path, leaf in jtu.tree_leaves_with_path(x) if is_array(leaf)]
    return f"x{jtu.keystr(paths[place])}"
