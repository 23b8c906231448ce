"""Converts the prefixes `in_axes` and `out_axes` to an axis for each leaf."""

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import jax.tree_util as jtu
from jaxtyping import PyTree

from ..._pytree import (
    is_array,
    is_array_like,
    is_array_or_traced_reference,
    is_reference,
    tree_pformat,
)

AxisSpec = int | None | Callable[[Any], int | None]

_MAX_SHOWN = 3
"""An error message lists at most this many arrays of the same size."""


@dataclasses.dataclass(frozen=True)
class if_array:
    """An axis specification: `axis` for arrays, `None` for everything else.

    >>> import jax.numpy as jnp
    >>> if_array(0)(jnp.ones(3)), if_array(0)("text")
    (0, None)
    """

    __module__ = "eqxlike"  # The public name, for pickles.

    axis: int

    def __call__(self, leaf: Any) -> int | None:
        return self.axis if is_array(leaf) else None


IF_ARRAY = if_array(axis=0)


def axes_of_arguments(
    function: Callable[..., Any], in_axes: PyTree[AxisSpec], args: tuple[Any, ...]
) -> list[int | None]:
    """The axis of each leaf of `args`.

    **Arguments:**

    - `in_axes`: a prefix of `args`, or a dictionary from parameter names of `function` to prefixes
      of the arguments; arguments without an entry use `if_array(0)`.

    **Raises:** the errors of `axis_of_each_leaf`; `ValueError` if a name belongs to no argument.
    """
    if not isinstance(in_axes, dict):
        return axis_of_each_leaf("in_axes", in_axes, args)
    # `bind` collects the values for `*args` in one tuple, so the leaves keep their order.
    arguments = inspect.signature(function).bind(*args).arguments
    unknown = tuple(name for name in in_axes if name not in arguments)
    if unknown:
        given = ", ".join(map(repr, arguments)) or "none"
        raise ValueError(
            f"The following `in_axes` did not correspond to any argument: {unknown}. The "
            f"arguments given by this call are {given}."
        )
    specs = tuple(in_axes.get(name, IF_ARRAY) for name in arguments)
    return axis_of_each_leaf("in_axes", specs, tuple(arguments.values()))


def axis_of_each_leaf(name: str, spec: PyTree[AxisSpec], tree: PyTree) -> list[int | None]:
    """The axis of each leaf of `tree`, from the prefix `spec`.

    **Arguments:**

    - `name`: `"in_axes"` or `"out_axes"`, for messages.

    **Raises:** `ValueError` if `spec` is not a prefix of `tree`, or an axis is not an `int`.
    """
    specs_and_subtrees: list[tuple[AxisSpec, PyTree]] = []
    try:
        jtu.tree_map(
            lambda spec, subtree: specs_and_subtrees.append((spec, subtree)),
            spec,
            tree,
            # A callable Module is one specification, not a tree of specifications.
            is_leaf=lambda node: node is None or callable(node),
        )
    except ValueError as error:
        whole = "the tuple of arguments" if name == "in_axes" else "what the function returned"
        why = str(error)
        if type(spec) is type(tree) is tuple and len(spec) != len(tree):
            why = f"it has {len(spec)} entries instead of {len(tree)}"
        raise ValueError(f"`{name}` is not a prefix of {whole}: {why}") from None
    axes: list[int | None] = []
    for spec, subtree in specs_and_subtrees:
        for leaf in jtu.tree_leaves(subtree):
            axis = spec(leaf) if callable(spec) else spec
            # `isinstance` would accept `True`, which is a mistake here.
            if axis is not None and type(axis) is not int:
                raise ValueError(
                    "`in_axes` and `out_axes` must consist of None, ints, and callables only; "
                    f"`{name}` has {axis!r} of type {type(axis).__name__}."
                )
            axes.append(axis)
    return axes


def size_of_axes(
    transform: str, args: tuple[Any, ...], axes: list[int | None], axis_size: int | None
) -> int | None:
    """The common size of all mapped axes; `None` if there are none and `axis_size` is `None`.

    **Arguments:**

    - `transform`: the name of the transformation, for messages.
    - `axes`: the axis of each leaf of `args`.
    - `axis_size`: the expected size of the axes, if the user passed a size.

    **Raises:** `ValueError` if the sizes differ or an axis is out of bounds, and `TypeError` if a
    leaf that is not an array has an axis. The messages name the paths.
    """
    sizes: dict[int, list[tuple[int, int]]] = {} if axis_size is None else {axis_size: []}
    for place, (leaf, axis) in enumerate(zip(jtu.tree_leaves(args), axes, strict=True)):
        if axis is None:
            continue
        if not (is_array_like(leaf) or is_reference(leaf)):
            raise TypeError(
                f"{_path(args, place)} = {leaf!r} of type {type(leaf)} is not a valid JAX type, "
                f"but `in_axes` maps it along axis {axis}. Its axis should be None."
            )
        shape = jnp.shape(leaf)
        if not -len(shape) <= axis < len(shape):
            rank = axis + 1 if axis >= 0 else -axis
            raise ValueError(
                f"`{transform}` was requested to map {_path(args, place)} along axis {axis}, which "
                f"implies that its rank should be at least {rank}, but is only {len(shape)} (its "
                f"shape is {shape}). To pass it unmapped, its axis in `in_axes` should be None."
            )
        sizes.setdefault(shape[axis], []).append((place, axis))
    if len(sizes) > 1:
        raise ValueError(_describe_sizes(transform, args, sizes, axis_size))
    return next(iter(sizes), None)


def _describe_sizes(
    transform: str,
    args: tuple[Any, ...],
    sizes: dict[int, list[tuple[int, int]]],
    axis_size: int | None,
) -> str:
    leaves = jtu.tree_leaves(args)
    lines = [f"`{transform}` got inconsistent sizes for array axes to be mapped:"]
    if axis_size is not None:
        lines.append(f"  * the `axis_size` argument was {axis_size};")
    for size, arrays in sizes.items():
        shown = [
            f"axis {axis} of {_path(args, place)}, {tree_pformat(leaves[place])}"
            for place, axis in arrays[:_MAX_SHOWN]
        ]
        if len(arrays) > _MAX_SHOWN:
            shown.append(f"{len(arrays) - _MAX_SHOWN} more")
        if shown:
            lines.append(f"  * size {size}: {'; '.join(shown)}.")
    lines.append("To pass an argument unmapped, its axis in `in_axes` should be None.")
    return "\n".join(lines)


def _path(args: tuple[Any, ...], place: int) -> str:
    """The path of the leaf with index `place`, as text."""
    path, _ = jtu.tree_leaves_with_path(args)[place]
    return f"args{jtu.keystr(path)}"


# --- The output of a mapped function: leaves with an axis, and leaves without ---


_array = object()


class MappedOutput:
    """The output of a mapped function, without its arrays.

    JAX needs the output axes before the function runs, but they are known only afterwards. So all
    output leaves with an axis are first stacked along axis 0. Then `tree` moves axis 0 to the axis
    that the user asked for.
    """

    def __init__(self, treedef: Any, axes: list[int | None], static: list[Any]):
        self._treedef = treedef
        self._axes = axes
        self._static = static  # The output, with `_array` in place of each array.

    def tree(self, stacked: list[Any], single: list[Any]) -> PyTree:
        """The output of the transformed function.

        **Raises:** `ValueError` with the path of an array whose axis is out of bounds.
        """
        next_stacked, next_single = iter(stacked), iter(single)
        leaves = []
        for place, (static, axis) in enumerate(zip(self._static, self._axes, strict=True)):
            if axis is not None:
                leaves.append(self._moved(next(next_stacked), axis, place))
            else:
                leaves.append(next(next_single) if static is _array else static)
        return self._treedef.unflatten(leaves)

    def _moved(self, array: Any, axis: int, place: int) -> Any:
        if axis == 0:
            return array
        if not -array.ndim <= axis < array.ndim:
            raise ValueError(
                f"`out_axes` stacks {self.path(place)} along axis {axis}: axis {axis} is out of "
                f"bounds for array of dimension {array.ndim}, including the new axis."
            )
        return jnp.moveaxis(array, 0, axis)

    def paths_of_single(self) -> list[str]:
        """The paths of the arrays that are not mapped over an axis."""
        return [
            self.path(place)
            for place, (static, axis) in enumerate(zip(self._static, self._axes, strict=True))
            if axis is None and static is _array
        ]

    def path(self, place: int) -> str:
        """The path of the leaf with index `place`, as text."""
        places = self._treedef.unflatten(range(len(self._axes)))
        path, _ = jtu.tree_leaves_with_path(places)[place]
        return f"output{jtu.keystr(path)}"


def take_apart(
    output: PyTree, out_axes: PyTree[AxisSpec]
) -> tuple[MappedOutput, list[Any], list[Any]]:
    """Splits an output into its structure, the leaves to stack, and the arrays without an axis.

    **Raises:** the errors of `axis_of_each_leaf`; `TypeError` with the path of a leaf that has
    an axis but is not an array.
    """
    axes = axis_of_each_leaf("out_axes", out_axes, output)
    leaves, treedef = jtu.tree_flatten(output)
    stacked: list[Any] = []
    single: list[Any] = []
    static: list[Any] = []
    mapped_output = MappedOutput(treedef, axes, static)
    for place, (leaf, axis) in enumerate(zip(leaves, axes, strict=True)):
        is_single = axis is None and is_array_or_traced_reference(leaf)
        static.append(_array if is_single or axis is not None else leaf)
        if is_single:
            single.append(leaf)
        elif axis is not None:
            if is_reference(leaf):
                if axis != 0:
                    raise ValueError(
                        f"{mapped_output.path(place)} is a mutable array reference, which "
                        f"`out_axes` stacks along axis {axis}: references are stacked along axis 0 "
                        "only."
                    )
            elif not is_array_like(leaf):
                raise TypeError(
                    f"{mapped_output.path(place)} = {leaf!r} of type {type(leaf)} is not a "
                    f"valid JAX type, but `out_axes` stacks it along axis {axis}. Its "
                    "axis should be None."
                )
            stacked.append(leaf)
    return mapped_output, stacked, single
