"""Whether an array can be split as a rule says, over the mesh there is."""

from collections.abc import Mapping
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

AnyMesh = Mesh | AbstractMesh


def fitting_sharding(
    mesh: AnyMesh, spec: PartitionSpec, leaf: jax.ShapeDtypeStruct, path: str
) -> NamedSharding:
    """The sharding of one array.

    Splits that mean the same are equal here: JAX compiles a program once more for another spelling.

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
    return NamedSharding(mesh, _normal_form(mesh, entries))


def num_devices_along(mesh: AnyMesh, names: tuple[str, ...]) -> int:
    """The number of parts that axes of the mesh make of an axis of an array."""
    parts = 1
    for name in names:
        parts *= mesh.shape[name]
    return parts


def without(entry: Any, names: tuple[str, ...]) -> Any:
    """An entry of a `PartitionSpec`, less some axes of the mesh."""
    entries = () if entry is None else (entry,) if isinstance(entry, str) else entry
    return _entry(tuple(name for name in entries if name not in names))


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


def _normal_form(mesh: AnyMesh, entries: list[tuple[str, ...]]) -> PartitionSpec:
    alone = tuple(name for name, size in mesh.shape.items() if size == 1)
    parts = [without(names, alone) for names in entries]
    while parts and parts[-1] is None:
        parts.pop()
    return PartitionSpec(*parts)


def _entry(names: tuple[str, ...]) -> Any:
    return None if not names else names[0] if len(names) == 1 else names
