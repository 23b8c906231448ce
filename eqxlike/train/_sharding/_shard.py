"""The placement of a training on its devices."""

from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jax.sharding import AbstractMesh, NamedSharding

from ..._compat import Tracer
from ..._dtypes import is_key
from .._checks import check_not_deleted
from .._state import Model, TrainState, copy_arrays
from ._sharding import Sharding

Tree = TypeVar("Tree")


def shard(state: TrainState[Model], sharding: Sharding) -> TrainState[Model]:
    """Places a state on the devices of a mesh, each array split as its rule says.

    What the optimiser keeps of a parameter lies as that parameter does; the step, the key, the loss
    scale and the state of the model are whole on each device.

    Within compiled code it says so to XLA. A model that is too large for one device is made in its
    parts:

        state = eqxlike.filter_jit(lambda key: train.shard(create(key), sharding))(key)

    With several processes all of them call it, with the same state.

    **Arguments:**

    - `state`: where to start. It is copied, and stays usable.
    - `sharding`: see `Sharding`, `data_parallel` and `fsdp`.

    **Returns:** the state, for a step of `make_step(..., sharding=sharding)`.

    **Raises:** `TypeError` if `state` is no `TrainState`, or `sharding` no `Sharding`; `ValueError`
    for a rule that matches no array or does not fit its array, with the path, and for an abstract
    mesh; `RuntimeError` if arrays of the state were donated.

    >>> import jax, jax.numpy as jnp, optax
    >>> from eqxlike import nn, train
    >>> optimiser, sharding = optax.adam(0.1), train.fsdp(min_size=0)
    >>> model = nn.Linear(2, 4 * jax.device_count(), key=jax.random.key(0))
    >>> state = train.TrainState.create(model, optimiser, key=jax.random.key(1))
    >>> state = train.shard(state, sharding)
    >>> def loss(model, x, key):
    ...     return jnp.mean(jax.vmap(model)(x) ** 2)
    >>> step = train.make_step(loss, optimiser, sharding=sharding)
    >>> state, loss = step(state, jnp.ones((jax.device_count(), 2)))
    >>> state.model.weight.addressable_shards[0].data.shape
    (4, 2)
    """
    check_sharding(sharding, "shard")
    if isinstance(sharding.mesh, AbstractMesh):
        raise ValueError(
            "shard expected a Sharding over devices, and this one has an AbstractMesh, which is "
            "for train.plan. Make the mesh with jax.make_mesh."
        )
    shardings = sharding.of_state(state)
    check_not_deleted(state, "state", "shard")
    return place(state, shardings)


def place_batch(batch: Tree, sharding: Sharding) -> Tree:
    """Places a batch, each device's part of the examples on it.

    With several processes all of them pass the same whole batch, and each moves its own part; no
    process looks at what another has. An array that lies over all of them already stays.

    **Raises:** `ValueError` for a leading axis that does not divide, with the path.
    """

    def placed(leaf: Any, where: NamedSharding | None) -> Any:
        if where is None or (isinstance(leaf, jax.Array) and not leaf.is_fully_addressable):
            return leaf
        if where.is_fully_addressable:
            return jax.device_put(leaf, where)
        numbers = np.asarray(leaf, jax.dtypes.canonicalize_dtype(leaf.dtype))
        return jax.make_array_from_callback(numbers.shape, where, lambda index: numbers[index])

    leaves, treedef = jtu.tree_flatten(batch)
    wheres = treedef.flatten_up_to(sharding.of_batch(batch))
    return treedef.unflatten(map(placed, leaves, wheres))


def check_sharding(sharding: Any, taker: str) -> None:
    """Raises `TypeError` for what is no `Sharding`, such as one of JAX."""
    if not isinstance(sharding, Sharding):
        raise TypeError(
            f"{taker} expected a train.Sharding, as train.data_parallel and train.fsdp return, got "
            f"{sharding!r}."
        )


def place(tree: Tree, shardings: Any) -> Tree:
    """The tree with each array where its sharding says; `None` leaves it as it is."""
    leaves, treedef = jtu.tree_flatten(tree)
    wheres = treedef.flatten_up_to(shardings)
    return treedef.unflatten(map(_place, leaves, wheres))


def _place(leaf: Any, where: NamedSharding | None) -> Any:
    if where is None:
        return leaf
    if isinstance(leaf, Tracer):
        return jax.lax.with_sharding_constraint(leaf, where)
    # A copy: where the first device has the array already, JAX makes no other, and the array that
    # was given would go with the one that a step donates.
    array = copy_arrays(jnp.asarray(leaf))
    if not is_key(array):
        return jax.device_put(array, where)
    # Over several processes JAX places the numbers of a key, and not the key.
    numbers = jax.device_put(jax.random.key_data(array), where)
    return jax.random.wrap_key_data(numbers, impl=jax.random.key_impl(array))
