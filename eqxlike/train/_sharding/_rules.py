"""Rules that map the path of each array of a model to a `PartitionSpec`."""

import dataclasses
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.tree_util as jtu
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec
from jaxtyping import PyTree

from ...extend import Gathering, Stacked, Which, is_array_or_struct, path_matches

# --- A PartitionSpec, checked against an array and a mesh ---


AnyMesh = Mesh | AbstractMesh


def fitting_sharding(
    mesh: AnyMesh, spec: PartitionSpec, leaf: jax.ShapeDtypeStruct, path: str
) -> NamedSharding:
    """The sharding of one array. Equivalent specs give equal shardings.

    **Raises:** `TypeError` if the rule did not return a `PartitionSpec`. `ValueError` if the spec
    has an unknown mesh axis, a mesh axis twice, or more entries than the array has axes.
    `ValueError` if the length of an axis is not divisible by the number of parts.
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
                f"Sharding: the rule for {what} names the mesh axis {name!r}, but the mesh has "
                f"{described(mesh.shape)}."
            )
        if names.count(name) > 1:
            raise ValueError(
                f"Sharding: the rule for {what} names the mesh axis {name!r} twice: {spec}. A mesh "
                "axis can split only one axis of an array."
            )
    if len(entries) > len(leaf.shape):
        raise ValueError(
            f"Sharding: {what} has {len(leaf.shape)} axes, but its rule, {spec}, is for "
            f"{len(entries)}."
        )
    for axis, (size, entry) in enumerate(zip(leaf.shape, entries, strict=False)):
        num_parts = num_devices_along(mesh, entry)
        if size % num_parts:
            raise ValueError(
                f"Sharding: {what} cannot be split: axis {axis} has length {size}, and {spec} "
                f"splits it into {num_parts} parts. Split another axis, or replicate the array "
                "with PartitionSpec()."
            )
    alone = tuple(name for name, size in mesh.shape.items() if size == 1)
    return sharding_of(mesh, (without(entry, alone) for entry in entries))


def num_devices_along(mesh: AnyMesh, names: tuple[str, ...]) -> int:
    """The number of parts into which mesh axes split an axis of an array."""
    return math.prod(mesh.shape[name] for name in names)


def without(entry: Any, names: tuple[str, ...]) -> Any:
    """Removes axes of the mesh from an entry of a `PartitionSpec`."""
    entries = () if entry is None else (entry,) if isinstance(entry, str) else entry
    left = tuple(name for name in entries if name not in names)
    return left[0] if len(left) == 1 else left or None


def described(axes: Mapping[str, int]) -> str:
    """The axes of a mesh and their sizes, for example `data=4, model=2`."""
    return ", ".join(f"{name}={size}" for name, size in axes.items())


def _axis_names(entry: Any, what: str) -> tuple[str, ...]:
    names = () if entry is None else entry if isinstance(entry, tuple) else (entry,)
    if not all(isinstance(name, str) for name in names):
        raise TypeError(
            f"Sharding: the rule for {what} must have the name of a mesh axis, a tuple of names, "
            f"or None for each axis; got {entry!r}."
        )
    return names


def sharding_of(mesh: AnyMesh, entries: Iterable[Any]) -> NamedSharding:
    """The sharding with these entries. Trailing `None`s are removed, because JAX would compile
    again for a sharding that is the same but has more `None`s.
    """
    entries = list(entries)
    while entries and entries[-1] is None:
        entries.pop()
    return NamedSharding(mesh, PartitionSpec(*entries))


# --- The arrays of a tree by path ---


Keys = tuple[Any, ...]


def arrays_by_keys(tree: PyTree) -> dict[Keys, jax.ShapeDtypeStruct]:
    """The shape and dtype of each array of a tree."""
    return {
        keys: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
        for keys, leaf in jtu.tree_leaves_with_path(tree)
        if is_array_or_struct(leaf)
    }


def name_of(keys: Keys) -> str:
    """A path in the format of rules and errors, such as `layers[0].weight`."""
    return jtu.keystr(keys).removeprefix(".")


Split = PartitionSpec | Callable[[str, jax.ShapeDtypeStruct], PartitionSpec]
"""A `PartitionSpec`, or a function that takes the path and the leaf and returns a `PartitionSpec`.
"""
Rules = tuple[tuple[Which, Split], ...]
REST = "**"


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


def as_rules(rules: Mapping[Which, Split] | Sequence[tuple[Which, Split]] | Split) -> Rules:
    """Converts rules to pairs of a pattern and a `Split`. Raises `TypeError` for a wrong type."""
    if isinstance(rules, PartitionSpec) or callable(rules):
        rules = {REST: rules}
    pairs: list[Any] = list(rules.items() if isinstance(rules, Mapping) else rules)
    for pair in pairs:
        if not (isinstance(pair, tuple) and len(pair) == 2):
            raise TypeError(
                f"Sharding: a rule must be a pair of a pattern and a PartitionSpec, got {pair!r}."
            )
        which, split = pair
        if not (isinstance(which, str) or callable(which)):
            raise TypeError(
                "Sharding: a pattern must be a string or a function of path and leaf, got "
                f"{which!r}."
            )
        if not (isinstance(split, PartitionSpec) or callable(split)):
            raise TypeError(
                f"Sharding: the rule for {which!r} must be a jax.sharding.PartitionSpec, or a "
                f"function of path and leaf that returns one; got {split!r}."
            )
    return tuple(pairs)


def specs_by_rules(
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
                f"Sharding: the rule for {which!r} applies to no array: no path matches, or an "
                "earlier rule matches first. The arrays are "
                f"{', '.join(map(name_of, leaves)) or 'none'}."
            )
    return specs


# --- Stacked layers, all-gathered one at a time ---


LAYERS = jtu.GetAttrKey("layers")


def stacks_by_keys(model: PyTree) -> dict[Keys, Keys]:
    """Finds the arrays whose leading axis is the axis of layers of a `Stacked`.

    Maps the path of each array to the path of its outermost `Stacked`. Arrays are not included if
    the `Stacked` was itself mapped over, as in an ensemble.
    """
    stacks: dict[Keys, Keys] = {}
    for keys, node in jtu.tree_leaves_with_path(model, is_leaf=_is_stacked):
        if _is_stacked(node):
            for inner, leaf in arrays_by_keys(node.layers).items():
                if leaf.shape[:1] == (node.depth,):
                    stacks[*keys, LAYERS, *inner] = keys
    return stacks


def gathered_by_layer(model: PyTree, split: PyTree, together: PyTree) -> dict[Keys, Keys]:
    """Finds the arrays that are all-gathered one layer at a time.

    These are the arrays of stacked layers that are split, but not along the axis of layers. Maps
    the path of each array to the path of its stack. `split` and `together` are the shardings before
    and after the all-gather.
    """
    before, after = (dict(jtu.tree_leaves_with_path(each)) for each in (split, together))
    return {
        keys: stack
        for keys, stack in stacks_by_keys(model).items()
        if before[keys] != after[keys] and before[keys].spec[0] is None
    }


def gathering(
    model: PyTree, stacks: Mapping[Keys, Keys], split: PyTree, together: PyTree
) -> PyTree:
    """Makes the stacks of a model all-gather their layers one at a time.

    `stacks` is the result of `gathered_by_layer`.
    """
    shapes = arrays_by_keys(model)
    before, after = (dict(jtu.tree_leaves_with_path(each)) for each in (split, together))

    def with_gathering(keys: Keys, node: Any) -> Any:
        start = len(keys) + 1
        gatherings = {
            each[start:]: Gathering(
                # This is the number of axes of one layer's array. If the stack is mapped over, its
                # arrays have fewer axes, and are not gathered.
                len(shapes[each].shape) - 1,
                *(sharding_of(where[each].mesh, where[each].spec[1:]) for where in (before, after)),
            )
            for each, stack in stacks.items()
            if stack == keys
        }
        return node.gathering(gatherings) if gatherings else node

    return jtu.tree_map_with_path(with_gathering, model, is_leaf=_is_stacked)


def _is_stacked(node: Any) -> bool:
    # If only some layers are frozen, `layers` is a tuple of several stacks.
    return isinstance(node, Stacked) and not isinstance(node.layers, tuple)


# --- The parameter of each array of an optimiser's state ---


def parameters_of_state(
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
