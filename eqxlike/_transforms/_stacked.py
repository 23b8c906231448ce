"""Stacked layers: they are all-gathered one at a time, and each layer's arrays have names.

Files that other libraries read or write have a name for each array. A name is the path of the
array, with dots between the parts: `layers.0.weight`. The layers of a `Stacked` are numbered like
the elements of a list. So a stacked array has one name for each of its layers, and each name refers
to one index of the leading axis. The arrays of a state are named after the layer that reads and
writes them.
"""

import copy
import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Self

import jax
import jax.tree_util as jtu
from jax.sharding import NamedSharding
from jaxtyping import PyTree

from .._module import AbstractVar, Module, field, stored_fields
from .._pytree import children_with_keys, is_array_or_struct


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


# --- The names of the arrays of a model ---


Path = tuple[Any, ...]

Parts = tuple[str | tuple[int, ...], ...]
"""The parts of a name. A tuple stands for an axis of stacked layers, and has the layer numbers."""


class StatePlace(Module):
    """Base class of `nn.StateIndex`; `marker` identifies the value that the index refers to."""

    marker: AbstractVar[Any]


class StateValues(Module):
    """Base class of `nn.State`."""

    def _values_by_marker(self) -> dict[Any, Any]:
        """The current value for each `StateIndex`; the keys are the markers of the indices."""
        raise NotImplementedError


@dataclasses.dataclass(frozen=True)
class NamedLeaf:
    """A leaf of a model, with its path and its names.

    `rows` maps each name to the part of the array that has this name, as an index into the leading
    axes. The index `()` is the whole array. `rows` is empty if the leaf is not an array.
    """

    leaf: Any
    path: Path
    rows: dict[str, tuple[int, ...]]


def named_leaves(model: PyTree) -> list[NamedLeaf]:
    """The leaves of `model` with their names, in the order of `jax.tree.leaves`.

    **Raises:** `ValueError` if an array in a `Stacked` lacks the leading axis, which has one index
    for each layer.
    """
    nodes = list(_nodes(model, (), ()))
    owners: dict[Any, tuple[Parts, Sequence[str] | None]] = {}
    for _, parts, names, node in nodes:
        if isinstance(node, StatePlace):
            before = owners.get(node.marker, (parts,))[0]
            owners[node.marker] = _joined(before, parts), names
    named = []
    for path, parts, _, node in nodes:
        if isinstance(node, StateValues):
            for path_in_state, parts_of_value, leaf in _state_leaves(node, owners):
                named.append(_named(leaf, (*path, *path_in_state), parts_of_value))
        elif not isinstance(node, StatePlace):
            named.append(_named(node, path, parts))
    return named


def _nodes(
    node: Any, path: Path, parts: Parts, names: Sequence[str] | None = None, start: int = 0
) -> Iterator[tuple[Path, Parts, Sequence[str] | None, Any]]:
    """Yields `(path, parts, names, node)` for each leaf, state index and state in a tree.

    - `names`: if `node` is a state index, the names that its layer gives to the arrays of this
      state.
    - `start`: if `node` is a `Stacked`, the number of its first layer.
    """
    if jtu.all_leaves([node]) or isinstance(node, StateValues):
        yield path, parts, None, node
        return
    if isinstance(node, StatePlace):
        yield path, parts, names, node
    for key, child in children_with_keys(node):
        part, below = jtu.keystr((key,), simple=True), (*path, key)
        if not isinstance(node, Stacked):
            of_child = getattr(type(node), "_state_names", {}).get(part)
            yield from _nodes(child, below, (*parts, part), of_child)
        elif isinstance(child, tuple) and isinstance(child[0], Stacked):
            for run_key, run in children_with_keys(child):
                yield from _nodes(run, (*below, run_key), parts, start=start)
                start += run.depth
        else:
            yield from _nodes(child, below, (*parts, tuple(range(start, start + node.depth))))


def _joined(before: Parts, parts: Parts) -> Parts:
    """Merges two names, given by their parts, of the same state value.

    If the value belongs to two consecutive `Stacked` Modules of the same stack, the result lists
    the layer numbers of both Modules. If the value belongs to two copies of a model, the result is
    its name in the first copy.
    """

    def words(parts: Parts) -> list[str | None]:
        return [part if isinstance(part, str) else None for part in parts]

    if words(before) != words(parts):
        return before
    pairs = zip(before, parts, strict=True)
    return tuple(
        a if a == b or isinstance(a, str) or isinstance(b, str) else (*a, *b) for a, b in pairs
    )


def _state_leaves(
    state: StateValues, owners: dict[Any, tuple[Parts, Sequence[str] | None]]
) -> Iterator[tuple[Path, Parts, Any]]:
    """Yields `(path in the state, parts of the name, leaf)` for each array of the state."""
    paths = [path for path, _ in jtu.tree_leaves_with_path(state)]
    for marker, value in state._values_by_marker().items():
        parts, names = owners.get(marker, ((str(marker),), None))
        for number, (path, leaf) in enumerate(jtu.tree_leaves_with_path(value)):
            if names is not None:
                own: Parts = (*parts[:-1], names[number])
            else:
                last = str(parts[-1]).removesuffix("_index")
                in_value = (jtu.keystr((key,), simple=True) for key in path)
                own = (*parts[:-1], last, *in_value)
            yield paths.pop(0), own, leaf


def _named(leaf: Any, path: Path, parts: Parts) -> NamedLeaf:
    """The leaf with its names. A stacked leaf has one name for each layer."""
    if not is_array_or_struct(leaf):
        return NamedLeaf(leaf, path, {})
    axes = [part for part in parts if isinstance(part, tuple)]
    lengths = tuple(map(len, axes))
    if leaf.shape[: len(axes)] != lengths:
        raise ValueError(
            f"model{jtu.keystr(path)} has shape {leaf.shape}; its shape must begin with the axes "
            f"of stacked layers, {lengths}. Pass the members of an ensemble, or of a "
            "`filter_vmap`, one by one."
        )
    rows = {}
    for row in itertools.product(*map(range, lengths)):
        numbers = (str(axis[index]) for axis, index in zip(axes, row, strict=True))
        # The last part of the path of a frozen array is empty.
        words = (part if isinstance(part, str) else next(numbers) for part in parts)
        rows[".".join(word for word in words if word)] = row
    return NamedLeaf(leaf, path, rows)
