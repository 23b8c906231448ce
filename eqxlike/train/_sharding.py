"""`Sharding`: how the arrays of a model and its batches are split over devices."""

import dataclasses
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec
from jaxtyping import PRNGKeyArray, PyTree

from .. import is_array
from .._check_numbers import whole_number
from .._compat import Tracer
from .._dtypes import is_key
from ..extend import Gathering, Stacked, Which, is_array_or_struct, note_check, path_matches
from ._checks import check_not_deleted
from ._state import Evaluate, Evaluation, Model, TrainState, check_state, copy_arrays

Tree = TypeVar("Tree")
AnyMesh = Mesh | AbstractMesh
Keys = tuple[Any, ...]
Split = PartitionSpec | Callable[[str, jax.ShapeDtypeStruct], PartitionSpec]
"""A `PartitionSpec`, or a function that takes the path and the leaf and returns a `PartitionSpec`.
"""
Rules = tuple[tuple[Which, Split], ...]


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
                axes = ", ".join(f"{axis}={size}" for axis, size in mesh.shape.items())
                raise ValueError(f"Sharding: batch_axes has {name!r}, but the mesh has {axes}.")
        # A step sets the sharding constraints itself, which is allowed only with `Auto` axes.
        is_abstract = isinstance(mesh, AbstractMesh)
        devices_or_sizes: Any = mesh.axis_sizes if is_abstract else mesh.devices
        mesh = type(mesh)(devices_or_sizes, mesh.axis_names)
        vars(self).update(mesh=mesh, rules=_as_rules(rules), batch_axes=batch_axes)

    @property
    def whole(self) -> NamedSharding:
        """The sharding of an array that is replicated on each device."""
        return NamedSharding(self.mesh, PartitionSpec())

    @property
    def batch(self) -> NamedSharding:
        """The sharding of an array of a batch. The leading axis is the axis of examples."""
        return _sharding_of(self.mesh, [self.batch_axes])

    def of_model(self, model: PyTree) -> PyTree:
        """A tree with the `NamedSharding` of each array of a model, and `None` for other leaves.
        The model may have `jax.ShapeDtypeStruct`s instead of arrays.

        **Raises:** `ValueError`, with the path, if a rule applies to no array, or does not fit its
        array. `TypeError` if a rule does not return a `PartitionSpec`.
        """
        leaves = _arrays_by_keys(model)
        specs = _specs_by_rules(self.rules, leaves, _stacks_by_keys(model))
        shardings = {
            keys: _fitting_sharding(self.mesh, specs[keys], leaf, _name_of(keys))
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
        model, parameters = self.of_model(state.model), _arrays_by_keys(state.model)
        of_parameters = dict(jtu.tree_leaves_with_path(model))
        owners = _parameters_of_state(_arrays_by_keys(state.optimiser_state), parameters)

        def of_leaf(keys: Keys, leaf: Any) -> NamedSharding | None:
            owner = owners.get(keys)
            if owner is None:
                return self.whole if is_array_or_struct(leaf) else None
            # The array may have more leading axes than the parameter.
            num_more = len(leaf.shape) - len(parameters[owner].shape)
            spec = PartitionSpec(*[None] * num_more, *of_parameters[owner].spec)
            return NamedSharding(self.mesh, spec)

        shardings = jtu.tree_map(
            lambda leaf: self.whole if is_array_or_struct(leaf) else None, state
        )
        optimiser_state = jtu.tree_map_with_path(of_leaf, state.optimiser_state)
        return dataclasses.replace(shardings, model=model, optimiser_state=optimiser_state)

    def of_batch(self, batch: PyTree, *, must_divide: bool = True) -> PyTree:
        """The `NamedSharding` of each array of a batch, and `None` for other leaves.

        Leading axes are split over `batch_axes`, and scalars are replicated. With
        `must_divide=False`, an array whose leading axis is not divisible is replicated too.

        **Raises:** `ValueError`, with the path, if a leading axis is not divisible and
        `must_divide=True`.
        """
        num_parts = _num_devices_along(self.mesh, self.batch_axes)

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

    def placed(leaf: Any, where: NamedSharding | None) -> Any:
        if where is None:
            return leaf
        if isinstance(leaf, Tracer):
            return jax.lax.with_sharding_constraint(leaf, where)
        # Copy the array, because the result of `device_put` may share its buffer on the first
        # device. Without a copy, a step that donates the result would delete the caller's array.
        array = copy_arrays(jnp.asarray(leaf))
        if not is_key(array):
            return jax.device_put(array, where)
        # Over several processes JAX can place the data of a key, but not the key itself.
        numbers = jax.device_put(jax.random.key_data(array), where)
        return jax.random.wrap_key_data(numbers, impl=jax.random.key_impl(array))

    return jtu.tree_map(placed, tree, shardings)


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
    split = sharding.of_model(model)
    together = jtu.tree_map(
        lambda where: _sharding_of(mesh, where.spec, sharding.batch_axes), split
    )
    before, after = (dict(jtu.tree_leaves_with_path(each)) for each in (split, together))
    # The arrays of stacked layers that are split, but not along the axis of layers.
    later = {
        keys: stack
        for keys, stack in _stacks_by_keys(model).items()
        if before[keys] != after[keys] and before[keys].spec[0] is None
    }
    at_once = jtu.tree_map_with_path(lambda keys, where: None if keys in later else where, together)
    model = place(place(model, split), at_once)
    shapes = _arrays_by_keys(model)

    def with_gathering(keys: Keys, node: Any) -> Any:
        gatherings = {
            each[len(keys) + 1 :]: Gathering(
                # This is the number of axes of one layer's array. If the stack is mapped over, its
                # arrays have fewer axes, and are not gathered.
                len(shapes[each].shape) - 1,
                *(_sharding_of(mesh, where[each].spec[1:]) for where in (before, after)),
            )
            for each, stack in later.items()
            if stack == keys
        }
        return node.gathering(gatherings) if gatherings else node

    return jtu.tree_map_with_path(with_gathering, model, is_leaf=_is_stacked)


# --- A PartitionSpec, checked against an array and a mesh ---


def _fitting_sharding(
    mesh: AnyMesh, spec: PartitionSpec, leaf: jax.ShapeDtypeStruct, path: str
) -> NamedSharding:
    """The sharding of one array. Equivalent specs give equal shardings.

    **Raises:** `TypeError` if the rule did not return a `PartitionSpec`. `ValueError` if the spec
    has an unknown mesh axis, a mesh axis twice, or more entries than the array has axes.
    `ValueError` if the length of an axis is not divisible by the number of parts.
    """
    what = f"{path or 'the model'}, of shape {leaf.shape},"
    if not isinstance(spec, PartitionSpec) or PartitionSpec.UNCONSTRAINED in spec:
        raise TypeError(
            f"Sharding: the rule for {what} must return a jax.sharding.PartitionSpec that has the "
            f"name of a mesh axis, a tuple of names, or None for each axis, got {spec!r}."
        )
    try:
        NamedSharding(mesh, spec)
    except Exception as error:
        raise ValueError(f"Sharding: the rule for {what} does not fit the mesh: {error}") from error
    entries = [_axis_names(entry) for entry in spec]
    if len(entries) > len(leaf.shape):
        raise ValueError(
            f"Sharding: {what} has {len(leaf.shape)} axes, but its rule, {spec}, is for "
            f"{len(entries)}."
        )
    for axis, (size, entry) in enumerate(zip(leaf.shape, entries, strict=False)):
        num_parts = _num_devices_along(mesh, entry)
        if size % num_parts:
            raise ValueError(
                f"Sharding: {what} cannot be split: axis {axis} has length {size}, and {spec} "
                f"splits it into {num_parts} parts. Split another axis, or replicate the array "
                "with PartitionSpec()."
            )
    return _sharding_of(mesh, spec, [name for name, size in mesh.shape.items() if size == 1])


def _num_devices_along(mesh: AnyMesh, names: tuple[str, ...]) -> int:
    """The number of parts into which mesh axes split an axis of an array."""
    return math.prod(mesh.shape[name] for name in names)


def _axis_names(entry: Any) -> tuple[str, ...]:
    """The mesh axes that an entry of a `PartitionSpec` names."""
    return () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)


def _sharding_of(
    mesh: AnyMesh, spec: Iterable[Any], dropped: Collection[str] = ()
) -> NamedSharding:
    """The sharding with the entries of `spec`, without the mesh axes `dropped`.

    Trailing `None`s are removed, because JAX would compile again for a sharding that is the same
    but has more `None`s.
    """
    names = [[name for name in _axis_names(entry) if name not in dropped] for entry in spec]
    while names and not names[-1]:
        names.pop()
    entries = (each[0] if len(each) == 1 else tuple(each) or None for each in names)
    return NamedSharding(mesh, PartitionSpec(*entries))


# --- The arrays of a tree by path ---


def _arrays_by_keys(tree: PyTree) -> dict[Keys, jax.ShapeDtypeStruct]:
    """The shape and dtype of each array of a tree."""
    return {
        keys: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
        for keys, leaf in jtu.tree_leaves_with_path(tree)
        if is_array_or_struct(leaf)
    }


def _name_of(keys: Keys) -> str:
    """A path in the format of rules and errors, such as `layers[0].weight`."""
    return jtu.keystr(keys).removeprefix(".")


@dataclasses.dataclass(frozen=True)
class LongestAxis:
    """A rule that splits the longest divisible axis of an array. If several axes are the longest,
    it splits the first of them.

    - `names`: the axes of the mesh over which the axis is split.
    - `num_parts`: number of parts into which the axis is split.
    - `min_size`: arrays with fewer elements are replicated.
    """

    names: tuple[str, ...]
    num_parts: int
    min_size: int

    def __call__(
        self, path: str, leaf: jax.ShapeDtypeStruct, *, is_stacked: bool = False
    ) -> PartitionSpec:
        """The `PartitionSpec` of an array.

        If `is_stacked`, the leading axis is the axis of layers. This axis is split only if no other
        axis is divisible, because layers that are split along the axis of layers cannot be
        all-gathered one at a time.
        """
        lengths = dict(enumerate(leaf.shape))
        axes = [axis for axis, length in lengths.items() if length % self.num_parts == 0]
        if leaf.size < self.min_size or not axes:
            return PartitionSpec()
        longest = max(axes, key=lambda axis: (not is_stacked or axis > 0, lengths[axis]))
        return PartitionSpec(*[None] * longest, self.names)


def _as_rules(rules: Mapping[Which, Split] | Sequence[tuple[Which, Split]] | Split) -> Rules:
    """Converts rules to pairs of a pattern and a `Split`. Raises `TypeError` for a wrong type."""
    if isinstance(rules, PartitionSpec) or callable(rules):
        rules = {"**": rules}
    pairs: list[Any] = list(rules.items() if isinstance(rules, Mapping) else rules)
    for pair in pairs:
        which, split = pair if isinstance(pair, tuple) and len(pair) == 2 else (None, None)
        is_pattern = isinstance(which, str) or callable(which)
        if not is_pattern or not (isinstance(split, PartitionSpec) or callable(split)):
            raise TypeError(
                "Sharding: a rule must be a pair of a pattern and a PartitionSpec. Functions of "
                f"path and leaf may replace the string or the PartitionSpec; got {pair!r}."
            )
    return tuple(pairs)


def _specs_by_rules(
    rules: Rules, leaves: Mapping[Keys, jax.ShapeDtypeStruct], stacked: Collection[Keys]
) -> dict[Keys, PartitionSpec]:
    """The `PartitionSpec` of each array, from the first rule that matches the array's path. If no
    rule matches, the array is replicated.

    **Arguments:**

    - `stacked`: the arrays whose leading axis is the axis of layers.

    **Raises:** `ValueError` if a rule other than `**` applies to no array.
    """
    specs, used = {}, set()
    for keys, leaf in leaves.items():
        path = _name_of(keys)
        place = next(
            (n for n, (which, _) in enumerate(rules) if path_matches(which, path, leaf)), None
        )
        used.add(place)
        split = PartitionSpec() if place is None else rules[place][1]
        if isinstance(split, LongestAxis):
            specs[keys] = split(path, leaf, is_stacked=keys in stacked)
        else:
            specs[keys] = split if isinstance(split, PartitionSpec) else split(path, leaf)
    for place, (which, _) in enumerate(rules):
        if place not in used and which != "**":
            raise ValueError(
                f"Sharding: the rule for {which!r} applies to no array: no path matches, or an "
                "earlier rule matches first. The arrays are "
                f"{', '.join(map(_name_of, leaves)) or 'none'}."
            )
    return specs


# --- Stacked layers, all-gathered one at a time ---


LAYERS = jtu.GetAttrKey("layers")


def _stacks_by_keys(model: PyTree) -> dict[Keys, Keys]:
    """Finds the arrays whose leading axis is the axis of layers of a `Stacked`.

    Maps the path of each array to the path of its outermost `Stacked`. Arrays are not included if
    the `Stacked` was itself mapped over, as in an ensemble.
    """
    stacks: dict[Keys, Keys] = {}
    for keys, node in jtu.tree_leaves_with_path(model, is_leaf=_is_stacked):
        if _is_stacked(node):
            for inner, leaf in _arrays_by_keys(node.layers).items():
                if leaf.shape[:1] == (node.depth,):
                    stacks[*keys, LAYERS, *inner] = keys
    return stacks


def _is_stacked(node: Any) -> bool:
    # If only some layers are frozen, `layers` is a tuple of several stacks.
    return isinstance(node, Stacked) and not isinstance(node.layers, tuple)


# --- The parameter of each array of an optimiser's state ---


def _parameters_of_state(
    state: Mapping[Keys, jax.ShapeDtypeStruct], parameters: Mapping[Keys, jax.ShapeDtypeStruct]
) -> dict[Keys, Keys | None]:
    """Finds the parameter to which each array of an optimiser's state belongs, or `None`.

    Moments are subtrees of the state in which every path is the path of a parameter. Of several
    such subtrees that contain an array, the largest is used. So if the model has parameters
    `weight` and `mu.weight`, `mu.weight` is not mistaken for a moment of `weight`.

    An array in such a subtree belongs to the parameter only if its last axes are the axes of the
    parameter. This is true for a history of gradients, and false for a factored moment.
    """
    other_prefixes = {
        keys[:length]
        for keys in state
        for length in range(len(keys) + 1)
        if keys[length:] not in parameters
    }
    found: dict[Keys, Keys | None] = {}
    for keys, leaf in state.items():
        ends = (keys[n:] for n in range(len(keys) + 1) if keys[:n] not in other_prefixes)
        parameter = found[keys] = next(ends, None)
        if parameter is not None:
            last_axes = parameters[parameter].shape
            if leaf.shape[len(leaf.shape) - len(last_axes) :] != last_axes:
                found[keys] = None
    return found
