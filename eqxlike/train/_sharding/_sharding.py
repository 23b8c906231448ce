"""`Sharding`: a mesh and rules; placement of states and batches; sharded losses and metrics."""

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
from ...extend import Which, is_array_or_struct, note_check
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
    gathered_by_layer,
    gathering,
    name_of,
    num_devices_along,
    parameters_of_state,
    specs_by_rules,
    stacks_by_keys,
    without,
)


@dataclasses.dataclass(frozen=True, init=False)
class Sharding:
    """A mesh of devices, and rules that say how the arrays of a model are split over the mesh.

    - `mesh`: the devices and the names of their axes. All axes are `jax.sharding.AxisType.Auto`,
      regardless of the mesh passed to the constructor.
    - `rules`: pairs of a pattern and a `PartitionSpec`, or of a pattern and a function that returns
      a `PartitionSpec`.
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

        - `mesh`: the mesh of devices. A `jax.sharding.AbstractMesh` is enough for `of_model` and
          `of_state`.
        - `rules`: a mapping from patterns to `jax.sharding.PartitionSpec`s, or a sequence of pairs.
          The first matching pattern is used. An array is replicated if no pattern matches. A single
          `PartitionSpec` or function, without a pattern, applies to all arrays.
            - A pattern is a path such as `layers[0].weight`. In a path, `*` matches a name or an
              index, and `**` matches anything. A pattern may also be a function that takes the path
              and a `jax.ShapeDtypeStruct` and returns a bool.
            - Instead of a `PartitionSpec`, a rule may have a function that takes the path and a
              `jax.ShapeDtypeStruct` and returns a `PartitionSpec`.
        - `batch_axes`: the axes of the mesh over which the examples of a batch are split. The
          default is the first axis. A parameter that is split over these axes is all-gathered
          within the step, as in FSDP. A parameter that is split over other axes stays split.

        **Raises:** `TypeError` if `mesh` is not a mesh, or a rule has the wrong type. `ValueError`
        if `batch_axes` has an axis that the mesh does not have.
        """
        if not isinstance(mesh, Mesh | AbstractMesh):
            raise TypeError(
                "Sharding expected a jax.sharding.Mesh, such as jax.make_mesh returns; got "
                f"{mesh!r}."
            )
        if batch_axes is None:
            batch_axes = mesh.axis_names[:1]
        batch_axes = (batch_axes,) if isinstance(batch_axes, str) else tuple(batch_axes)
        for name in batch_axes:
            if name not in mesh.shape:
                raise ValueError(
                    f"Sharding: batch_axes has {name!r}, but the mesh has {described(mesh.shape)}."
                )
        mesh = _with_auto_axes(mesh)
        vars(self).update(mesh=mesh, rules=as_rules(rules), batch_axes=batch_axes)

    @property
    def whole(self) -> NamedSharding:
        """The sharding of an array that is replicated on each device."""
        return NamedSharding(self.mesh, PartitionSpec())

    @property
    def batch(self) -> NamedSharding:
        """The sharding of an array of a batch. The leading axis is the axis of examples."""
        axes = self.batch_axes
        spec = PartitionSpec(axes[0] if len(axes) == 1 else axes) if axes else PartitionSpec()
        return NamedSharding(self.mesh, spec)

    def of_model(self, model: PyTree) -> PyTree:
        """A tree with the `NamedSharding` of each array of a model, and `None` for other leaves.
        The model may have `jax.ShapeDtypeStruct`s instead of arrays.

        **Raises:** `ValueError`, with the path, if a rule applies to no array, or does not fit its
        array. `TypeError` if a rule does not return a `PartitionSpec`.
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

        Arrays of the optimiser's state that belong to a parameter are split like the parameter. All
        other arrays outside the model are replicated.

        **Raises:** the errors of `of_model`. `TypeError` if `state` is not a `TrainState`.
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

        Leading axes are split over `batch_axes`, and scalars are replicated. With
        `must_divide=False`, an array whose leading axis is not divisible is replicated too.

        **Raises:** `ValueError`, with the path, if a leading axis is not divisible and
        `must_divide=True`.
        """
        num_parts = num_devices_along(self.mesh, self.batch_axes)

        def of_leaf(keys: Any, leaf: Any) -> NamedSharding | None:
            if not is_array_or_struct(leaf):
                return None
            divides = bool(leaf.shape) and leaf.shape[0] % num_parts == 0
            if leaf.shape and not divides and must_divide:
                raise ValueError(
                    f"Sharding: the batch cannot be split: {jtu.keystr(keys) or 'it'} has "
                    f"{leaf.shape[0]} examples, in shape {leaf.shape}, and the mesh axes "
                    f"{', '.join(self.batch_axes)} split them into {num_parts} parts. Choose a "
                    f"batch size that is a multiple of {num_parts}."
                )
            return self.batch if divides else self.whole

        return jtu.tree_map_with_path(of_leaf, batch)

    def of_gathered(self, model: PyTree) -> PyTree:
        """The shardings of the arrays of a model after an all-gather along `batch_axes`."""

        def gathered(sharding: NamedSharding) -> NamedSharding:
            entries = (without(entry, self.batch_axes) for entry in sharding.spec)
            return NamedSharding(self.mesh, PartitionSpec(*entries))

        return jtu.tree_map(gathered, self.of_model(model))

    def _of_optimiser_state(self, state: PyTree, model: PyTree, shardings: PyTree) -> PyTree:
        leaves, parameters = arrays_by_keys(state), arrays_by_keys(model)
        of_parameters = dict(jtu.tree_leaves_with_path(shardings))
        owners = parameters_of_state(leaves, parameters)

        def of_leaf(keys: Any, leaf: Any) -> NamedSharding | None:
            if keys not in leaves:
                return None
            owner = owners[keys]
            if owner is None:
                return self.whole
            # The array may have more leading axes than the parameter.
            num_more = len(leaves[keys].shape) - len(parameters[owner].shape)
            return NamedSharding(
                self.mesh, PartitionSpec(*[None] * num_more, *of_parameters[owner].spec)
            )

        return jtu.tree_map_with_path(of_leaf, state)


def _with_auto_axes(mesh: Mesh | AbstractMesh) -> Mesh | AbstractMesh:
    """The same mesh with `Auto` axes, because a step sets the sharding constraints itself."""
    if isinstance(mesh, Mesh):
        return Mesh(mesh.devices, mesh.axis_names)
    return AbstractMesh(mesh.axis_sizes, mesh.axis_names)


# --- Data parallelism and FSDP ---


AXIS = "data"
Devices = Sequence[jax.Device] | Mesh | AbstractMesh


def data_parallel(devices: Devices | None = None) -> Sharding:
    """Data parallelism: each device has the whole model and a part of each batch.

    **Arguments:**

    - `devices`: a sequence of devices, or a mesh. The examples are split over all axes of the mesh.
      The default is all devices of all processes.

    **Raises:** `ValueError` if `devices` is empty. `TypeError` if `devices` is a single device.

    >>> import jax
    >>> from eqxlike import train
    >>> sharding = train.data_parallel()
    >>> sharding.mesh.size == jax.device_count(), sharding.batch.spec
    (True, P('data',))
    """
    mesh = _mesh_of(devices, "data_parallel")
    return Sharding(mesh, {}, batch_axes=mesh.axis_names)


def fsdp(devices: Devices | None = None, *, min_size: int = 2**16) -> Sharding:
    """Fully sharded data parallelism: each device has a part of each batch, of each array of the
    model, and of the optimiser's state.

    When the step needs a parameter, it all-gathers the parameter. The step sums the gradient of the
    parameter over devices. Each device updates its own part of the parameters. Each array is split
    along its longest divisible axis. If several axes are the longest, the first of them is split.

    The layers of an `nn.ScanStack` are all-gathered one at a time, in the forward and the backward
    pass. The gradients of the layers are summed one at a time too. The axis of layers is split only
    if no other axis is divisible. If a loss reads `stack.layers` directly, XLA chooses when to
    gather the layers.

    Source: Rajbhandari et al. (2020), "ZeRO: Memory Optimizations Toward Training Trillion
    Parameter Models".

    **Arguments:**

    - `devices`: a sequence of devices, or a mesh. Examples and arrays are split over all axes of
      the mesh. The default is all devices of all processes.
    - `min_size`: an array with fewer elements is replicated. An array without a divisible axis is
      replicated too.

    **Raises:** `ValueError` if `devices` is empty, or if `min_size` is not an integer of at least
    0. `TypeError` if `devices` is a single device.

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
    """The mesh of a sequence of devices. A mesh is returned unchanged.

    **Raises:** `ValueError` if `devices` is empty. `TypeError` if `devices` is a single device.
    """
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


# --- Placement on devices ---


Tree = TypeVar("Tree")


def shard(state: TrainState[Model], sharding: Sharding) -> TrainState[Model]:
    """Places a state on the devices of a mesh, split by the rules of a `Sharding`.

    Arrays of the optimiser's state that belong to a parameter are split like the parameter. The
    step, the key, the loss scale and the model's state are replicated.

    Inside `jit`, this function adds sharding constraints. Then each device creates only its part of
    the state, so the model may be too large for one device:

        state = eqxlike.filter_jit(lambda key: train.shard(create(key), sharding))(key)

    If there are several processes, all must call this function with the same state.

    **Arguments:**

    - `state`: the initial state. It is copied and stays usable.
    - `sharding`: see `Sharding`, `data_parallel` and `fsdp`.

    **Returns:** the state on the devices. Pass it to a step of `make_step(..., sharding=sharding)`.

    **Raises:** `TypeError` if `state` is not a `TrainState`, or `sharding` is not a `Sharding`.
    `ValueError`, with the path, if a rule applies to no array or does not fit its array.
    `ValueError` if the mesh is abstract. `RuntimeError` if arrays of the state were donated.

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
            "shard expected a Sharding over devices, got one with an AbstractMesh: create the mesh "
            "with jax.make_mesh."
        )
    shardings = sharding.of_state(state)
    check_not_deleted(state, "state", "shard")
    return place(state, shardings)


def place_batch(batch: Tree, sharding: Sharding) -> Tree:
    """Splits a batch over devices.

    If there are several processes, each process must pass the same whole batch. This is not
    checked. Each process moves only its own part. Arrays that are already sharded over several
    processes are unchanged.

    **Raises:** `ValueError`, with the path, if a leading axis is not divisible.
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
    """Raises `TypeError` unless `sharding` is a `train.Sharding`. A sharding of JAX is not."""
    if not isinstance(sharding, Sharding):
        raise TypeError(
            f"{taker} expected a train.Sharding, such as train.data_parallel or train.fsdp "
            f"returns; got {sharding!r}."
        )


def place(tree: Tree, shardings: Any) -> Tree:
    """Places each array of a tree by its sharding. A leaf whose sharding is `None` is unchanged."""
    return jtu.tree_map(_place, tree, shardings)


def _place(leaf: Any, where: NamedSharding | None) -> Any:
    if where is None:
        return leaf
    if isinstance(leaf, Tracer):
        return jax.lax.with_sharding_constraint(leaf, where)
    # Copy the array, because the result of `device_put` may share its buffer on the first device.
    # Without a copy, a step that donates the result would delete the caller's array.
    array = copy_arrays(jnp.asarray(leaf))
    if not is_key(array):
        return jax.device_put(array, where)
    # Over several processes JAX can place the data of a key, but not the key itself.
    numbers = jax.device_put(jax.random.key_data(array), where)
    return jax.random.wrap_key_data(numbers, impl=jax.random.key_impl(array))


# --- Sharded losses and metrics ---


def evaluate_sharded(evaluate: Evaluate, sharding: Sharding) -> Evaluate:
    """Returns a loss that all-gathers the model and splits the batch, then computes `evaluate`.

    This also gives gradients with the right sharding, because the transpose of a sharding
    constraint is the same constraint. If a parameter is replicated, its gradient is summed over
    devices. If a parameter is split, each device keeps its part of the gradient.
    """

    def evaluated(model: Any, model_state: Any, batch: Any, key: PRNGKeyArray) -> Evaluation:
        batch = place(batch, sharding.of_batch(batch))
        evaluation = evaluate(_all_gathered(model, sharding), model_state, batch, key)
        loss = evaluation.loss
        return evaluation._replace(loss=place(loss, sharding.whole if is_array(loss) else None))

    return evaluated


def measure_sharded(measure: Callable[..., Any], sharding: Sharding) -> Callable[..., Any]:
    """Returns a function that all-gathers the model and splits the batch, then computes `measure`.

    The first argument is the model, and the last argument is the batch. Arrays of the batch are
    split only if their length is divisible by the number of parts.
    """

    def measured(model: Any, *between_and_batch: Any) -> Any:
        *between, batch = between_and_batch
        batch = place(batch, sharding.of_batch(batch, must_divide=False))
        return measure(_all_gathered(model, sharding), *between, batch)

    return measured


def _all_gathered(model: Model, sharding: Sharding) -> Model:
    """All-gathers the arrays of a model along the batch axes.

    The arrays of stacked layers are gathered one layer at a time, in the loop over layers. All
    other arrays are gathered at once. Without these constraints, XLA may decide to split features
    instead, and exchange activations.
    """
    mesh = sharding.mesh
    if isinstance(mesh, Mesh) and mesh.size > 1 and mesh.devices.flat[0].platform == "cpu":
        # XLA's CPU devices share threads. A device that is a step ahead waits for the other
        # devices, and may block a thread that the other devices need. A loop of a few hundred steps
        # may therefore deadlock. To prevent this, the call waits for its result, as a call with a
        # check does.
        note_check()
    split, together = sharding.of_model(model), sharding.of_gathered(model)
    later = gathered_by_layer(model, split, together)
    at_once = jtu.tree_map_with_path(lambda keys, where: None if keys in later else where, together)
    return gathering(place(place(model, split), at_once), later, split, together)
