"""Which axes of the arguments of a program are of any size, and what they are called."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.export
import jax.tree_util as jtu

from .._module import Module
from .._pytree import is_array

Dynamic = Sequence[str] | Mapping[str, Mapping[int, str] | Sequence[str | None]]


def with_dynamic_axes(
    parameters: Sequence[str], args: tuple[Any, ...], dynamic: Dynamic
) -> tuple[Any, ...]:
    """The arguments with a `jax.ShapeDtypeStruct` for each array, whose dynamic axes are symbolic.

    **Arguments:**

    - `parameters`: what the arguments are called.
    - `args`: any pytrees. A shape of a `jax.ShapeDtypeStruct` may hold names.
    - `dynamic`: see `export`.

    **Raises:** `ValueError`, with the path, for an axis or an argument that is not there.
    """
    names = dict(zip(parameters, args, strict=True))
    shapes = {
        path: list(leaf.shape)
        for name, arg in names.items()
        for path, leaf in _arrays_with_paths(name, arg)
    }
    sizes: dict[str, tuple[int, str]] = {}
    if isinstance(dynamic, Mapping):
        for place, axes in dynamic.items():
            for path in _paths_at(place, shapes):
                _name_axes(shapes[path], _by_axis(axes), path, sizes)
    elif all(isinstance(size, int) for shape in shapes.values() for size in shape):
        axes = _by_axis(dynamic)
        for name, arg in names.items():
            # Arrays of a Module are its weights, which no batch has one more of.
            for path, _ in _arrays_with_paths(name, arg, is_leaf=_is_module):
                shape = shapes[path]
                own = {axis: name for axis, name in axes.items() if axis < len(shape)}
                _name_axes(shape, own, path, sizes)
    symbolic = _symbolic(shapes)

    def as_struct(path: str, leaf: Any) -> Any:
        dtype = jax.dtypes.canonicalize_dtype(leaf.dtype, allow_extended_dtype=True)
        is_weak = bool(getattr(leaf, "weak_type", False))
        return jax.ShapeDtypeStruct(symbolic[path], dtype, weak_type=is_weak)

    return tuple(
        jtu.tree_map_with_path(
            lambda path, leaf, name=name: (
                as_struct(f"{name}{jtu.keystr(path)}", leaf) if _has_shape(leaf) else leaf
            ),
            arg,
        )
        for name, arg in names.items()
    )


def _has_shape(leaf: Any) -> bool:
    return is_array(leaf) or isinstance(leaf, jax.ShapeDtypeStruct)


def _is_module(node: Any) -> bool:
    return isinstance(node, Module)


def _arrays_with_paths(name: str, tree: Any, is_leaf: Any = None) -> list[tuple[str, Any]]:
    leaves = jtu.tree_leaves_with_path(tree, is_leaf=is_leaf)
    return [(f"{name}{jtu.keystr(path)}", leaf) for path, leaf in leaves if _has_shape(leaf)]


def _paths_at(place: str, shapes: dict[str, list[Any]]) -> list[str]:
    """The paths of all arrays of an argument, or of one array by its path."""
    below = (f"{place}[", f"{place}.")
    paths = [path for path in shapes if path == place or path.startswith(below)]
    if not paths:
        known = ", ".join(shapes) or "none"
        raise ValueError(
            f"`dynamic` names axes of {place!r}, and there is no such array among the arguments. "
            f"There are: {known}."
        )
    return paths


def _by_axis(axes: Any) -> dict[int, Any]:
    if isinstance(axes, Mapping):
        return dict(axes)
    names = [axes] if isinstance(axes, str) else axes
    if not isinstance(names, Sequence):
        raise ValueError(
            f"`dynamic` has {axes!r}, and not names of axes, as in ('batch',) or "
            "{'x': {0: 'batch'}}."
        )
    return {axis: name for axis, name in enumerate(names) if name is not None}


def _name_axes(
    shape: list[Any], axes: dict[int, Any], path: str, sizes: dict[str, tuple[int, str]]
) -> None:
    """Puts names in the places of sizes.

    **Arguments:**

    - `sizes`: the size of each named axis so far, and where that was; those of `shape` are added.
    """
    for axis, name in axes.items():
        if not isinstance(name, str):
            raise ValueError(
                f"`dynamic` has {name!r} for axis {axis} of {path}: a name is a string, as in "
                "('batch',) or {'x': {0: 'batch'}}."
            )
        if not -len(shape) <= axis < len(shape):
            raise ValueError(
                f"`dynamic` names axis {axis} of {path} {name!r}, and that has {len(shape)} axes."
            )
        other, where = sizes.setdefault(name, (shape[axis], path))
        if other != shape[axis]:
            raise ValueError(
                f"`dynamic` names axis {axis} of {path} {name!r}: it has size {shape[axis]}, and "
                f"that of {where} has {other}. Say which axes are meant, as in "
                "`dynamic={'x': {0: 'batch'}}`."
            )
        shape[axis] = name


def _symbolic(shapes: dict[str, list[Any]]) -> dict[str, tuple[Any, ...]]:
    """The shapes with the sizes of one scope in the places of names."""
    sizes = [size for shape in shapes.values() for size in shape]
    scopes = [size.scope for size in sizes if jax.export.is_symbolic_dim(size)]
    scope = scopes[0] if scopes else jax.export.SymbolicScope()
    found = {}
    for path, shape in shapes.items():
        try:
            found[path] = tuple(
                _symbol(size, scope) if isinstance(size, str) else size for size in shape
            )
        except ValueError as error:
            raise ValueError(
                f"The shape {tuple(shape)} of {path} cannot be read: {error}"
            ) from None
    return found


def _symbol(name: str, scope: jax.export.SymbolicScope) -> Any:
    """The size of this name; raises `ValueError` if it is not the name of one axis."""
    try:
        sizes = jax.export.symbolic_shape(name, scope=scope)
    except ValueError:
        raise ValueError(
            f"{name!r} is neither a name, as in 'batch', nor an expression of names, as in "
            "'2*batch'."
        ) from None
    if len(sizes) != 1:
        raise ValueError(
            f"{name!r} names {len(sizes)} axes. Give a name for each, as in ('batch', 'time')."
        )
    return sizes[0]
