"""On which devices the arrays of a training lie, and which part of each."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec
from jaxtyping import PRNGKeyArray, PyTree

from ... import is_array
from ..._check_numbers import whole_number
from ..._compat import Tracer
from ..._dtypes import is_key
from ...extend import Which, note_check
from .._checks import check_not_deleted
from .._state import Evaluate, Evaluation, Model, TrainState, check_state, copy_arrays
from ._rules import (
    AnyMesh,
    LongestAxis,
    Rules,
    Split,
    arrays_by_keys,
    as_rules,
    described,
    fitting_sharding,
    followed,
    gathered_by_layer,
    gathering,
    is_array_or_struct,
    name_of,
    num_devices_along,
    specs_by_rules,
    stacks_by_keys,
    without,
)


@dataclasses.dataclass(frozen=True, init=False)
class Sharding:
    """A mesh of devices, and rules for the split of a model's arrays over it.

    - `mesh`: the devices and the names of their axes. XLA propagates along all of them
      (`jax.sharding.AxisType.Auto`), whatever the mesh said that it was made from.
    - `rules`: pairs of a pattern and a split.
    - `batch_axes`: the axes of the mesh over which examples are split.

    >>> import jax
    >>> from jax.sharding import PartitionSpec as P
    >>> from eqxlike import nn, train
    >>> mesh = jax.sharding.AbstractMesh((4, 2), ("data", "model"))
    >>> sharding = Sharding(mesh, {"layers[*].weight": P("model"), "**": P()})
    >>> model = nn.MLP(2, 2, 4, 1, key=jax.random.key(0))
    >>> sharding.of_model(model).layers[0].weight.spec, sharding.batch.spec
    (P('model',), P('data',))
    """

    mesh: AnyMesh
    rules: Rules
    batch_axes: tuple[str, ...]

    def __init__(
        self,
        mesh: Mesh | AbstractMesh,
        rules: Mapping[Which, Split] | Sequence[tuple[Which, Split]] | Split,
        *,
        batch_axes: str | Sequence[str] | None = None,
    ):
        """**Arguments:**

        - `mesh`: the devices; a `jax.sharding.AbstractMesh` is enough for `of_model` and
          `of_state`.
        - `rules`: from patterns to `jax.sharding.PartitionSpec`s; the first pattern that matches
          counts, and an array that none matches is whole on each device. A pattern is a path such
          as `layers[0].weight`, in which `*` matches a name or an index and `**` anything,
          or a function of path and `jax.ShapeDtypeStruct` that returns a bool. In place of a
          `PartitionSpec` there may be a function of path and leaf that returns one; alone, either
          is for all arrays.
        - `batch_axes`: the axes of the mesh over which the examples of a batch are split: the
          first one by default. A parameter that is split over them too is all-gathered
          within the step, as in FSDP; one that is split over another axis stays so.

        **Raises:** `TypeError` for what is not a mesh, and for a rule of another form; `ValueError`
        for `batch_axes` that the mesh does not have.
        """
        if not isinstance(mesh, Mesh | AbstractMesh):
            raise TypeError(
                f"Sharding expected a jax.sharding.Mesh, as jax.make_mesh returns it, got {mesh!r}."
            )
        if batch_axes is None:
            batch_axes = mesh.axis_names[:1]
        batch_axes = (batch_axes,) if isinstance(batch_axes, str) else tuple(batch_axes)
        for name in batch_axes:
            if name not in mesh.shape:
                raise ValueError(
                    f"Sharding: batch_axes has {name!r}, and the mesh has {described(mesh.shape)}."
                )
        object.__setattr__(self, "mesh", _with_auto_axes(mesh))
        object.__setattr__(self, "rules", as_rules(rules))
        object.__setattr__(self, "batch_axes", batch_axes)

    @property
    def whole(self) -> NamedSharding:
        """The sharding of an array that is whole on each device."""
        return NamedSharding(self.mesh, PartitionSpec())

    @property
    def batch(self) -> NamedSharding:
        """The sharding of an array whose leading axis is that of examples."""
        axes = self.batch_axes
        spec = PartitionSpec(axes[0] if len(axes) == 1 else axes) if axes else PartitionSpec()
        return NamedSharding(self.mesh, spec)

    def of_model(self, model: PyTree) -> PyTree:
        """The `NamedSharding` for each array of a model, or of a tree of `jax.ShapeDtypeStruct`s;
        `None` for what is not an array.

        **Raises:** `ValueError` for a rule that matches no array, and for one that does not fit its
        array, with the path; `TypeError` for a rule that returns no `PartitionSpec`.
        """
        leaves = arrays_by_keys(model)
        specs = specs_by_rules(self.rules, leaves, stacks_by_keys(model))
        shardings = {
            keys: fitting_sharding(self.mesh, specs[keys], leaf, name_of(keys))
            for keys, leaf in leaves.items()
        }
        return jtu.tree_map_with_path(lambda keys, _: shardings.get(keys), model)

    def of_state(self, state: TrainState) -> TrainState:
        """A `TrainState` with the `NamedSharding` of each array, and `None` for other leaves.

        What the optimiser keeps of a parameter is split as that parameter; all else is whole on
        each device.

        **Raises:** what `of_model` raises; `TypeError` for what is not a `TrainState`.
        """
        check_state(state, "Sharding")
        shardings = jtu.tree_map(
            lambda leaf: self.whole if is_array_or_struct(leaf) else None, state
        )
        model = self.of_model(state.model)
        optimiser_state = self._of_optimiser_state(state.optimiser_state, state.model, model)
        return dataclasses.replace(shardings, model=model, optimiser_state=optimiser_state)

    def of_batch(self, batch: PyTree, *, must_divide: bool = True) -> PyTree:
        """The `NamedSharding` of each array of a batch, and `None` for other leaves.

        Leading axes are split over `batch_axes`; what has no axis is whole on each device, as is
        what does not divide where it need not.

        **Raises:** `ValueError` for a leading axis that must divide and does not, with the path.
        """
        num_parts = num_devices_along(self.mesh, self.batch_axes)

        def of_leaf(keys: Any, leaf: Any) -> NamedSharding | None:
            if not is_array_or_struct(leaf):
                return None
            divides = bool(leaf.shape) and leaf.shape[0] % num_parts == 0
            if leaf.shape and not divides and must_divide:
                raise ValueError(
                    f"Sharding: the batch does not divide: {jtu.keystr(keys) or 'it'} has "
                    f"{leaf.shape[0]} examples, of shape {leaf.shape}, and the mesh axes "
                    f"{', '.join(self.batch_axes)} split them into {num_parts} parts. Choose a "
                    "batch size that is a multiple."
                )
            return self.batch if divides else self.whole

        return jtu.tree_map_with_path(of_leaf, batch)

    def of_gathered(self, model: PyTree) -> PyTree:
        """The shardings of a model that is all-gathered from the devices that split a batch."""

        def gathered(sharding: NamedSharding) -> NamedSharding:
            entries = (without(entry, self.batch_axes) for entry in sharding.spec)
            return NamedSharding(self.mesh, PartitionSpec(*entries))

        return jtu.tree_map(gathered, self.of_model(model))

    def _of_optimiser_state(self, state: PyTree, model: PyTree, shardings: PyTree) -> PyTree:
        leaves, parameters = arrays_by_keys(state), arrays_by_keys(model)
        of_parameters = dict(jtu.tree_leaves_with_path(shardings))
        owners = followed(leaves, parameters)

        def of_leaf(keys: Any, leaf: Any) -> NamedSharding | None:
            if keys not in leaves:
                return None
            owner = owners[keys]
            if owner is None:
                return self.whole
            # The last axes are the parameter's.
            num_more = len(leaves[keys].shape) - len(parameters[owner].shape)
            return NamedSharding(
                self.mesh, PartitionSpec(*[None] * num_more, *of_parameters[owner].spec)
            )

        return jtu.tree_map_with_path(of_leaf, state)


def _with_auto_axes(mesh: Mesh | AbstractMesh) -> Mesh | AbstractMesh:
    """The same devices, with the axes left to XLA: a step says itself what lies where."""
    if isinstance(mesh, Mesh):
        return Mesh(mesh.devices, mesh.axis_names)
    return AbstractMesh(mesh.axis_sizes, mesh.axis_names)


# --- The two shardings that most trainings need ---


AXIS = "data"
Devices = Sequence[jax.Device] | Mesh | AbstractMesh


def data_parallel(devices: Devices | None = None) -> Sharding:
    """Each device has the whole model and a part of each batch.

    **Arguments:**

    - `devices`: all that JAX has by default, in all processes. A mesh is taken as it is: examples
      are split over all its axes.

    **Raises:** `ValueError` for no devices.

    >>> import jax
    >>> from eqxlike import train
    >>> sharding = train.data_parallel()
    >>> sharding.mesh.size == jax.device_count(), sharding.batch.spec
    (True, P('data',))
    """
    mesh = _mesh_of(devices, "data_parallel")
    return Sharding(mesh, {}, batch_axes=mesh.axis_names)


def fsdp(devices: Devices | None = None, *, min_size: int = 2**16) -> Sharding:
    """Each device has a part of each batch, and a part of each array of the model and of what the
    optimiser keeps.

    Fully sharded data parallelism (Rajbhandari et al., 2020, "ZeRO: Memory Optimizations Toward
    Training Trillion Parameter Models"). Within the step a parameter is all-gathered where it
    is needed; its gradient is summed over devices, and each updates its own part. Of an array the
    longest axis that divides is split, the first of those that are as long.

    The layers of an `nn.ScanStack` are all-gathered one at a time in the forward and in the
    backward pass, and their gradients summed likewise. The axis of layers is split only where no
    other divides. What a loss reads off `stack.layers` by itself is left to XLA.

    **Arguments:**

    - `devices`: all that JAX has by default, in all processes. A mesh is taken as it is: examples
      and arrays are split over all its axes.
    - `min_size`: arrays with fewer numbers are whole on each device, as are those of which no axis
      divides.

    **Raises:** `ValueError` for no devices, or a `min_size` that is not an integer of at least 0.

    >>> import jax
    >>> from eqxlike import nn, train
    >>> sharding = train.fsdp(min_size=16)
    >>> model = nn.Linear(4, 2 * jax.device_count(), key=jax.random.key(0))
    >>> sharding.of_model(model).weight.shard_shape(model.weight.shape)
    (2, 4)
    """
    min_size = whole_number(min_size, "min_size", least=0)
    mesh = _mesh_of(devices, "fsdp")
    names = mesh.axis_names

    return Sharding(mesh, LongestAxis(names, mesh.size, min_size), batch_axes=names)


def _mesh_of(devices: Devices | None, taker: str) -> Mesh | AbstractMesh:
    """**Raises:** `ValueError` for no devices."""
    if isinstance(devices, Mesh | AbstractMesh):
        return devices
    if isinstance(devices, jax.Device):
        raise TypeError(
            f"{taker} expected a sequence of devices, got one, {devices!r}: put it in a list."
        )
    devices = jax.devices() if devices is None else list(devices)
    if not devices:
        raise ValueError(f"{taker} needs at least one device, got none.")
    return jax.make_mesh(
        (len(devices),), (AXIS,), axis_types=(jax.sharding.AxisType.Auto,), devices=devices
    )


# --- The placement of a training on its devices ---


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

    **Raises:** `TypeError` if `state` is not a `TrainState`, or `sharding` no `Sharding`;
    `ValueError` for a rule that matches no array or does not fit its array, with the path, and for
    an abstract mesh; `RuntimeError` if arrays of the state were donated.

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
            "shard expected a Sharding over devices, and this one has an AbstractMesh. Make the "
            "mesh with jax.make_mesh."
        )
    shardings = sharding.of_state(state)
    check_not_deleted(state, "state", "shard")
    return place(state, shardings)


def place_batch(batch: Tree, sharding: Sharding) -> Tree:
    """Places a batch, each device's part of the examples on it.

    With several processes all of them pass the same whole batch, and each moves its own part; no
    process looks at what another has. An array that is sharded over all of them already stays.

    **Raises:** `ValueError` for a leading axis that does not divide, with the path.
    """

    def placed(leaf: Any, where: NamedSharding | None) -> Any:
        if where is None or (isinstance(leaf, jax.Array) and not leaf.is_fully_addressable):
            return leaf
        if where.is_fully_addressable:
            return jax.device_put(leaf, where)
        numbers = np.asarray(leaf, jax.dtypes.canonicalize_dtype(leaf.dtype))
        return jax.make_array_from_callback(numbers.shape, where, lambda index: numbers[index])

    return jtu.tree_map(placed, batch, sharding.of_batch(batch))


def check_sharding(sharding: Any, taker: str) -> None:
    """Raises `TypeError` for what is not a `Sharding`, such as one of JAX."""
    if not isinstance(sharding, Sharding):
        raise TypeError(
            f"{taker} expected a train.Sharding, as train.data_parallel and train.fsdp return, got "
            f"{sharding!r}."
        )


def place(tree: Tree, shardings: Any) -> Tree:
    """The tree with each array where its sharding says; `None` leaves it as it is."""
    return jtu.tree_map(_place, tree, shardings)


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


# --- A loss, or metrics, over several devices ---


def evaluate_sharded(evaluate: Evaluate, sharding: Sharding) -> Evaluate:
    """The same loss, with the model all-gathered and the batch split.

    The transpose of a constraint is that constraint: gradients are summed over devices where the
    parameter is whole, and each device keeps its part where it is split.
    """

    def evaluated(model: Any, model_state: Any, batch: Any, key: PRNGKeyArray) -> Evaluation:
        batch = place(batch, sharding.of_batch(batch))
        evaluation = evaluate(_all_gathered(model, sharding), model_state, batch, key)
        loss = evaluation.loss
        return evaluation._replace(loss=place(loss, sharding.whole if is_array(loss) else None))

    return evaluated


def measure_sharded(measure: Callable[..., Any], sharding: Sharding) -> Callable[..., Any]:
    """The same metrics, with the model all-gathered and the batch, which comes last, split as far
    as it divides.
    """

    def measured(model: Any, *between_and_batch: Any) -> Any:
        *between, batch = between_and_batch
        batch = place(batch, sharding.of_batch(batch, must_divide=False))
        return measure(_all_gathered(model, sharding), *between, batch)

    return measured


def _all_gathered(model: Model, sharding: Sharding) -> Model:
    """The model, each array of it all-gathered from the devices that split a batch: at once, or,
    where layers are stored stacked, as the loop over these comes to it.

    Left to itself, XLA may split the work along features instead, and exchange activations.
    """
    mesh = sharding.mesh
    if isinstance(mesh, Mesh) and mesh.size > 1 and mesh.devices.flat[0].platform == "cpu":
        # XLA's devices on CPU share threads. One that is a step ahead of the others, and waits for
        # them, may take the thread that they need: a loop of a few hundred steps hung for good. So
        # the call waits for its result, as for a check, also one of which it is a part.
        note_check()
    split, together = sharding.of_model(model), sharding.of_gathered(model)
    later = gathered_by_layer(model, split, together)
    at_once = jtu.tree_map_with_path(lambda keys, where: None if keys in later else where, together)
    return gathering(place(place(model, split), at_once), split, together)
