"""On which devices the arrays of a training lie, and which part of each."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax.tree_util as jtu
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec
from jaxtyping import PyTree

from ..._pytree import Which
from .._checks import check_state
from .._state import TrainState
from ._fit_to_mesh import AnyMesh, described, fitting_sharding, num_devices_along, without
from ._follow import followed, spec_like
from ._paths import arrays_by_keys, is_array_or_struct, name_of
from ._rules import Rules, Split, as_rules, specs_by_rules
from ._stacks import stacks_by_keys


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

        - `mesh`: the devices; a `jax.sharding.AbstractMesh` is enough for `train.plan`.
        - `rules`: from patterns to `jax.sharding.PartitionSpec`s; the first pattern that matches
          counts, and an array that none matches is whole on each device. A pattern is a path such
          as `layers[0].weight`, in which `*` stands for a name or an index and `**` for anything,
          or a function of path and `jax.ShapeDtypeStruct` that returns a bool. In place of a
          `PartitionSpec` there may be a function of path and leaf that returns one; alone, either
          is for all arrays.
        - `batch_axes`: the axes of the mesh over which the examples of a batch are split: the
          first one by default. A parameter that is split over them too is brought together
          within the step, as in FSDP; one that is split over another axis stays so.

        **Raises:** `TypeError` for what is no mesh, and for a rule of another form; `ValueError`
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
        `None` for what is no array.

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
        """A `TrainState` with the `NamedSharding` for each array of one, `None` for what is none.

        What the optimiser keeps of a parameter is split as that parameter; all else is whole on
        each device.

        **Raises:** as `of_model`; `TypeError` for what is no `TrainState`.
        """
        check_state(state, TrainState, "Sharding")
        shardings = jtu.tree_map(
            lambda leaf: self.whole if is_array_or_struct(leaf) else None, state
        )
        model = self.of_model(state.model)
        optimiser_state = self._of_optimiser_state(state.optimiser_state, state.model, model)
        return dataclasses.replace(shardings, model=model, optimiser_state=optimiser_state)

    def of_batch(self, batch: PyTree, *, must_divide: bool = True) -> PyTree:
        """The `NamedSharding` for each array of a batch, `None` for what is none.

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
        """As `of_model`, with each array brought together from the devices that split a batch."""

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
            spec = spec_like(of_parameters[owner].spec, parameters[owner], leaves[keys])
            return NamedSharding(self.mesh, spec)

        return jtu.tree_map_with_path(of_leaf, state)


def _with_auto_axes(mesh: Mesh | AbstractMesh) -> Mesh | AbstractMesh:
    """The same devices, with the axes left to XLA: a step says itself what lies where."""
    if isinstance(mesh, Mesh):
        return Mesh(mesh.devices, mesh.axis_names)
    return AbstractMesh(mesh.axis_sizes, mesh.axis_names)
