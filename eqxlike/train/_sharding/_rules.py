"""Rules that say how each array of a model is split, by its path."""

import dataclasses
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.tree_util as jtu
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec
from jaxtyping import PyTree

from ... import is_array
from ...extend import Gathering, Stacked, Which, path_matches

# --- Whether an array can be split as a rule says, over the mesh there is ---


AnyMesh = Mesh | AbstractMesh


def fitting_sharding(
    mesh: AnyMesh, spec: PartitionSpec, leaf: jax.ShapeDtypeStruct, path: str
) -> NamedSharding:
    """The sharding of one array.

    Splits that mean the same are equal here.

    **Raises:** `TypeError` if the rule gave something else than a `PartitionSpec`; `ValueError` for
    an axis that the mesh does not have or that is named twice, for more axes than the array has,
    and for an axis that does not divide over its devices.
    """
    what = f"{path or 'the model'}, of shape {leaf.shape},"
    if not isinstance(spec, PartitionSpec):
        raise TypeError(
            f"Sharding: the rule for {what} must return a jax.sharding.PartitionSpec, got {spec!r}."
        )
    entries = [_axis_names(entry, what) for entry in spec]
    names = [name for entry in entries for name in entry]
    for name in names:
        if name not in mesh.shape:
            raise ValueError(
                f"Sharding: {what} is to be split over the mesh axis {name!r}, and the mesh has "
                f"{described(mesh.shape)}."
            )
        if names.count(name) > 1:
            raise ValueError(
                f"Sharding: {what} is to be split over the mesh axis {name!r} twice, by {spec}. "
                "Each mesh axis can split one axis of an array."
            )
    if len(entries) > len(leaf.shape):
        raise ValueError(
            f"Sharding: {what} has {len(leaf.shape)} axes, and its rule says {spec}, for "
            f"{len(entries)}."
        )
    for axis, (size, entry) in enumerate(zip(leaf.shape, entries, strict=False)):
        num_parts = num_devices_along(mesh, entry)
        if size % num_parts:
            raise ValueError(
                f"Sharding: {what} does not divide: axis {axis} has length {size}, and {spec} "
                f"splits it into {num_parts} parts. Split another axis, or leave it whole with "
                "PartitionSpec()."
            )
    alone = tuple(name for name, size in mesh.shape.items() if size == 1)
    return sharding_of(mesh, (without(entry, alone) for entry in entries))


def num_devices_along(mesh: AnyMesh, names: tuple[str, ...]) -> int:
    """The number of parts that axes of the mesh make of an axis of an array."""
    return math.prod(mesh.shape[name] for name in names)


def without(entry: Any, names: tuple[str, ...]) -> Any:
    """An entry of a `PartitionSpec`, less some axes of the mesh."""
    entries = () if entry is None else (entry,) if isinstance(entry, str) else entry
    left = tuple(name for name in entries if name not in names)
    return left[0] if len(left) == 1 else left or None


def described(axes: Mapping[str, int]) -> str:
    """The axes of a mesh and their sizes, as in `data=4, model=2`."""
    return ", ".join(f"{name}={size}" for name, size in axes.items())


def _axis_names(entry: Any, what: str) -> tuple[str, ...]:
    names = () if entry is None else entry if isinstance(entry, tuple) else (entry,)
    if not all(isinstance(name, str) for name in names):
        raise TypeError(
            f"Sharding: the rule for {what} has {entry!r} where the name of a mesh axis, a tuple "
            "of such names, or None is expected."
        )
    return names


def sharding_of(mesh: AnyMesh, entries: Iterable[Any]) -> NamedSharding:
    """The sharding by the entries of a `PartitionSpec`, of which those of no split at the end are
    left out: JAX compiles a program once more for another spelling.
    """
    entries = list(entries)
    while entries and entries[-1] is None:
        entries.pop()
    return NamedSharding(mesh, PartitionSpec(*entries))


# --- The arrays of a tree, with the paths that rules and errors know them by ---


Keys = tuple[Any, ...]


def is_array_or_struct(leaf: Any) -> bool:
    """Whether a leaf has a place on devices, or represents one that has."""
    return is_array(leaf) or isinstance(leaf, jax.ShapeDtypeStruct)


def arrays_by_keys(tree: PyTree) -> dict[Keys, jax.ShapeDtypeStruct]:
    """The shape and dtype of each array of a tree."""
    return {
        keys: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
        for keys, leaf in jtu.tree_leaves_with_path(tree)
        if is_array_or_struct(leaf)
    }


def name_of(keys: Keys) -> str:
    """A path as rules have it: `layers[0].weight`."""
    return jtu.keystr(keys).removeprefix(".")


Split = PartitionSpec | Callable[[str, jax.ShapeDtypeStruct], PartitionSpec]
"""The axes of the mesh that each axis of an array is split over, or a function of path and leaf
that returns them.
"""
Rules = tuple[tuple[Which, Split], ...]
REST = "**"


@dataclasses.dataclass(frozen=True)
class LongestAxis:
    """A split of the longest axis that divides, the first of those that are as long.

    - `names`: the axes of the mesh, which make `num_parts` of it.
    - `min_size`: arrays with fewer numbers stay whole.
    """

    names: tuple[str, ...]
    num_parts: int
    min_size: int

    def __call__(
        self, path: str, leaf: jax.ShapeDtypeStruct, *, is_stacked: bool = False
    ) -> PartitionSpec:
        """Of an array that `is_stacked` the axis of layers is the last choice: split along it, the
        layers cannot be all-gathered one at a time.
        """
        lengths = dict(enumerate(leaf.shape))
        axes = [axis for axis, length in lengths.items() if length % self.num_parts == 0]
        if leaf.size < self.min_size or not axes:
            return PartitionSpec()
        longest = max(axes, key=lambda axis: (not is_stacked or axis > 0, lengths[axis]))
        return PartitionSpec(*[None] * longest, self.names)


def as_rules(rules: Mapping[Which, Split] | Sequence[tuple[Which, Split]] | Split) -> Rules:
    """Rules as pairs of a pattern and a split.

    **Raises:** `TypeError` for anything else.
    """
    if isinstance(rules, PartitionSpec) or callable(rules):
        rules = {REST: rules}
    pairs: list[Any] = list(rules.items() if isinstance(rules, Mapping) else rules)
    for pair in pairs:
        if not (isinstance(pair, tuple) and len(pair) == 2):
            raise TypeError(
                f"Sharding: a rule is a pair of a pattern and a PartitionSpec, got {pair!r}."
            )
        which, split = pair
        if not (isinstance(which, str) or callable(which)):
            raise TypeError(
                "Sharding: a pattern must be a string or a function of path and leaf, got "
                f"{which!r}."
            )
        if not (isinstance(split, PartitionSpec) or callable(split)):
            raise TypeError(
                f"Sharding: the rule for {which!r} must give a jax.sharding.PartitionSpec, or a "
                f"function of path and leaf that returns one; got {split!r}."
            )
    return tuple(pairs)


def specs_by_rules(
    rules: Rules, leaves: Mapping[Keys, jax.ShapeDtypeStruct], stacked: Collection[Keys]
) -> dict[Keys, PartitionSpec]:
    """The split of each array by the first rule that matches its path; whole where none does.

    **Arguments:**

    - `stacked`: the arrays whose leading axis is that of layers.

    **Raises:** `ValueError` for a rule that is the first to match for no array. `**` may match
    none.
    """
    specs, used = {}, set()
    for keys, leaf in leaves.items():
        path = name_of(keys)
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
        if place not in used and which != REST:
            raise ValueError(
                f"Sharding: the rule for {which!r} matches no array of the model that an earlier "
                f"rule left. The arrays are {', '.join(map(name_of, leaves)) or 'none'}."
            )
    return specs


# --- Which arrays of a model are stacked, and all-gathered one layer at a time ---


LAYERS = jtu.GetAttrKey("layers")


class Stack(NamedTuple):
    """A `Stacked` in which an array stands.

    - `keys`: its path in the model.
    - `depth`: how many layers it has.
    - `num_at_once`: how many of these are in use at once.
    """

    keys: Keys
    depth: int
    num_at_once: int


def stacks_by_keys(model: PyTree) -> dict[Keys, Stack]:
    """The outermost stack for each array of a model whose leading axis is that of layers.

    It is not where the stack itself was mapped over, as in an ensemble.
    """
    stacks: dict[Keys, Stack] = {}
    for keys, node in jtu.tree_leaves_with_path(model, is_leaf=_is_stacked):
        if _is_stacked(node):
            stack = Stack(keys, node.depth, min(node.depth, node.unroll))
            for inner, leaf in arrays_by_keys(node.layers).items():
                if leaf.shape[:1] == (node.depth,):
                    stacks[*keys, LAYERS, *inner] = stack
    return stacks


def gathered_by_layer(model: PyTree, split: PyTree, together: PyTree) -> dict[Keys, Stack]:
    """The stack for each array that is all-gathered one layer at a time: those that are split
    along other axes than that of layers.
    """
    before, after = (dict(jtu.tree_leaves_with_path(each)) for each in (split, together))
    return {
        keys: stack
        for keys, stack in stacks_by_keys(model).items()
        if before[keys] != after[keys] and before[keys].spec[0] is None
    }


def gathering(model: PyTree, split: PyTree, together: PyTree) -> PyTree:
    """The model with stacks that all-gather their layers."""
    stacks = gathered_by_layer(model, split, together)
    shapes = arrays_by_keys(model)
    before, after = (dict(jtu.tree_leaves_with_path(each)) for each in (split, together))

    def told(keys: Keys, node: Any) -> Any:
        start = len(keys) + 1
        gatherings = {
            each[start:]: Gathering(
                # A stack that is mapped over has fewer axes to name.
                len(shapes[each].shape) - 1,
                *(sharding_of(where[each].mesh, where[each].spec[1:]) for where in (before, after)),
            )
            for each, stack in stacks.items()
            if stack.keys == keys
        }
        return node.gathering(gatherings) if gatherings else node

    return jtu.tree_map_with_path(told, model, is_leaf=_is_stacked)


def _is_stacked(node: Any) -> bool:
    # If some layers are frozen, `layers` is a tuple of several stacks.
    return isinstance(node, Stacked) and not isinstance(node.layers, tuple)


# --- Which parameter each array of an optimiser's state belongs to ---


def followed(
    state: Mapping[Keys, jax.ShapeDtypeStruct], parameters: Mapping[Keys, jax.ShapeDtypeStruct]
) -> dict[Keys, Keys | None]:
    """The parameter for each array of an optimiser's state; `None` for what belongs to none.

    Moments hang in the state as the parameters do in the model: below some node of the state every
    path is a path of the model. The highest such node is meant, so that a parameter `mu.weight`
    next to one called `weight` is not taken for its moment. Optimisers that see a part of the model
    have fewer arrays there. An array belongs to its parameter if its last axes are the
    parameter's, as those of a history are, and a factor of a moment is not.
    """
    strangers = {
        keys[:length]
        for keys in state
        for length in range(len(keys) + 1)
        if keys[length:] not in parameters
    }
    found: dict[Keys, Keys | None] = {}
    for keys, leaf in state.items():
        ends = (keys[n:] for n in range(len(keys) + 1) if keys[:n] not in strangers)
        parameter = found[keys] = next(ends, None)
        if parameter is not None:
            last_axes = parameters[parameter].shape
            if leaf.shape[len(leaf.shape) - len(last_axes) :] != last_axes:
                found[keys] = None
    return found
