"""What a training would need, by shapes alone."""

import dataclasses
import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import jax.random as jr
import jax.tree_util as jtu
import optax
from jax.sharding import AbstractMesh, Mesh
from jaxtyping import PyTree

from ..._pytree import filter, is_inexact_array
from ..._tables import align, grouped
from ..._transforms import filter_eval_shape
from .._checks import check_optimiser
from .._state import TrainState
from ._rules import Keys, Stack, arrays_by_keys, described, gathered_by_layer, num_devices_along
from ._sharding import Sharding, check_sharding, fsdp


class Memory(NamedTuple):
    """The size of some arrays.

    - `in_all`: bytes of the whole arrays.
    - `a_device`: bytes of the parts that one device has.
    """

    in_all: int
    a_device: int


class Exchange(NamedTuple):
    """What devices send each other in one step for one purpose.

    - `kind`: `all-gather`, `reduce-scatter` or `all-reduce`. XLA may do several arrays at once, and
      an all-reduce in place of a reduce-scatter, of which each device keeps its part; on CPU it
      does.
    - `what`: `parameters` or `gradients`.
    - `num_arrays`: how many.
    - `num_bytes`: of these arrays, as one device has them when they are all-gathered. What is
      all-gathered one layer at a time counts twice, for the forward and the backward pass, though
      XLA leaves out what the backward pass does not need, such as a bias.
    """

    kind: str
    what: str
    num_arrays: int
    num_bytes: int


@dataclasses.dataclass(frozen=True)
class Plan:
    """What `train.plan` found; printed, it is a table.

    - `mesh`: the sizes of the mesh's axes.
    - `parameters`: the arrays of the model that are trained.
    - `other_arrays`: all others of the model, and those of the training: step, key and flag.
    - `moments`: what the optimiser keeps.
    - `gradients`: one for each parameter, split as it is.
    - `gathered`: parameters that a step all-gathers, if all are there at once: the most that
      they add on each device. Of an `nn.ScanStack` it is one layer, or those of one `unroll`. So
      much again may their gradients take before they are split. What XLA frees early, and layers
      whose values are computed again, need less.
    - `exchanges`: for parameters and gradients, in one step. What the loss computes may need more:
      sums over a batch, and activations where an array is split over other axes than a batch.
    """

    mesh: Mapping[str, int]
    parameters: Memory
    other_arrays: Memory
    moments: Memory
    gradients: Memory
    gathered: Memory
    exchanges: tuple[Exchange, ...]

    @property
    def at_rest(self) -> Memory:
        """Parameters, moments and other arrays: what devices hold between steps."""
        return _total((self.parameters, self.moments, self.other_arrays))

    def __str__(self) -> str:
        memories = {
            "parameters": self.parameters,
            "moments": self.moments,
            "other arrays": self.other_arrays,
            "at rest": self.at_rest,
            "gradients": self.gradients,
            "gathered, at most": self.gathered,
        }
        memory = align(
            ["bytes", "in all", "a device"],
            [
                [name, grouped(each.in_all), grouped(each.a_device)]
                for name, each in memories.items()
            ],
        )
        size = math.prod(self.mesh.values())
        parts = [f"{size} devices: {described(self.mesh)}", memory]
        if self.exchanges:
            header = ["a step", "of", "arrays", "bytes"]
            rows = [
                [each.kind, each.what, grouped(each.num_arrays), grouped(each.num_bytes)]
                for each in self.exchanges
            ]
            parts.append(align(header, rows))
        return "\n\n".join(parts)


def plan(
    model: PyTree, optimiser: optax.GradientTransformation, sharding: Sharding | Mesh | AbstractMesh
) -> Plan:
    """The memory of each device and the exchange between them that a training would need.

    Only shapes are read: nothing is allocated, and no device is used. Activations are not in
    it: they depend on the batch.

    **Arguments:**

    - `model`: a model, or one of `jax.ShapeDtypeStruct`s as `filter_eval_shape` makes it.
    - `optimiser`: the one to train with.
    - `sharding`: on any mesh, also a `jax.sharding.AbstractMesh` of devices that are not here. A
      mesh alone means `train.fsdp(mesh)`.

    **Raises:** `TypeError` for what is not a model, optimiser or `Sharding`; `ValueError` for a
    rule that matches no array or does not fit its array.

    >>> import eqxlike as eqx, jax, optax
    >>> from eqxlike import nn, train
    >>> model = eqx.filter_eval_shape(nn.Linear, 4096, 8192, key=jax.random.key(0))
    >>> mesh = jax.sharding.AbstractMesh((64,), ("data",))
    >>> print(train.plan(model, optax.adam(1e-3), mesh))
    64 devices: data=64
    <BLANKLINE>
    bytes                   in all    a device
    ...
    """
    check_optimiser(optimiser, "plan")
    if isinstance(sharding, Mesh | AbstractMesh):
        sharding = fsdp(sharding)
    check_sharding(sharding, "plan")
    state, trained = filter_eval_shape(_start, model, optimiser)
    where = sharding.of_state(state)
    trained = {keys for keys, _ in jtu.tree_leaves_with_path(trained)}
    of_model = _sizes(state.model, where.model)
    parameters = {keys: size for keys, size in of_model.items() if keys in trained}
    in_all = _total(_sizes(state, where).values())
    moments = _total(_sizes(state.optimiser_state, where.optimiser_state).values())
    known = _total([moments, *parameters.values()])
    whole = sharding.of_gathered(state.model)
    together = _sizes(state.model, whole)
    by_layer = gathered_by_layer(state.model, where.model, whole)
    gathered = {
        keys: _at_once(size, by_layer.get(keys))
        for keys, size in together.items()
        if size.a_device > of_model[keys].a_device
    }
    return Plan(
        mesh=dict(sharding.mesh.shape),
        parameters=_total(parameters.values()),
        other_arrays=Memory(*(each - part for each, part in zip(in_all, known, strict=True))),
        moments=moments,
        gradients=_total(parameters.values()),
        gathered=_total(gathered.values()),
        exchanges=tuple(_exchanges(sharding, parameters, together, gathered, by_layer)),
    )


def _start(model: Any, optimiser: optax.GradientTransformation) -> tuple[TrainState, PyTree]:
    state = TrainState.create(model, optimiser, key=jr.key(0))
    return state, filter(state.model, is_inexact_array)


def _sizes(tree: PyTree, shardings: PyTree) -> dict[Keys, Memory]:
    wheres = dict(jtu.tree_leaves_with_path(shardings))
    found = {}
    for keys, leaf in arrays_by_keys(tree).items():
        shapes = leaf.shape, wheres[keys].shard_shape(leaf.shape)
        found[keys] = Memory(*(math.prod(shape) * leaf.dtype.itemsize for shape in shapes))
    return found


def _total(memories: Iterable[Memory]) -> Memory:
    memories = list(memories)
    return Memory(sum(each.in_all for each in memories), sum(each.a_device for each in memories))


def _at_once(size: Memory, stack: Stack | None) -> Memory:
    if stack is None:
        return size
    return Memory(*(each * stack.num_at_once // stack.depth for each in size))


def _exchanges(
    sharding: Sharding,
    parameters: Mapping[Keys, Memory],
    together: Mapping[Keys, Memory],
    gathered: Collection[Keys],
    by_layer: Collection[Keys],
) -> Iterator[Exchange]:
    if num_devices_along(sharding.mesh, sharding.batch_axes) == 1:
        return
    for kind, what, keys, again in (
        ("all-gather", "parameters", set(gathered), by_layer),
        ("reduce-scatter", "gradients", parameters.keys() & gathered, ()),
        ("all-reduce", "gradients", parameters.keys() - gathered, ()),
    ):
        if keys:
            num_bytes = sum(together[each].a_device * (1 + (each in again)) for each in keys)
            yield Exchange(kind, what, len(keys), num_bytes)
