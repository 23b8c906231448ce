"""The output of a mapped function, split into leaves that have an axis and leaves that do not."""

from typing import Any

import jax.numpy as jnp
import jax.tree_util as jtu
from jaxtyping import PyTree

from ..._pytree import is_array_like, is_array_or_traced_reference, is_reference
from ._axes import AxisSpec, axis_of_each_leaf

_array = object()


class MappedOutput:
    """The output of a mapped function, without its arrays.

    The axes are known only once the function has run, but JAX asks for them before. So all leaves
    that have an axis are stacked along axis 0, and this axis is moved afterwards.
    """

    def __init__(self, treedef: Any, axes: list[int | None], static: list[Any]):
        self._treedef = treedef
        self._axes = axes
        self._static = static  # `_array` in the place of each array.

    def tree(self, stacked: list[Any], single: list[Any]) -> PyTree:
        """The output of the transformed function.

        **Raises:** `ValueError` naming the path of an array that lacks its axis.
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
                f"bounds for array of dimension {array.ndim}, the new axis included."
            )
        return jnp.moveaxis(array, 0, axis)

    def paths_of_single(self) -> list[str]:
        """The paths of the arrays without axis."""
        return [
            self.path(place)
            for place, (static, axis) in enumerate(zip(self._static, self._axes, strict=True))
            if axis is None and static is _array
        ]

    def path(self, place: int) -> str:
        """The path of the leaf at `place`."""
        places = self._treedef.unflatten(range(len(self._axes)))
        path, _ = jtu.tree_leaves_with_path(places)[place]
        return f"output{jtu.keystr(path)}"


def take_apart(
    output: PyTree, out_axes: PyTree[AxisSpec]
) -> tuple[MappedOutput, list[Any], list[Any]]:
    """The form of `output`, its leaves to stack, and its arrays that are the same for all.

    **Raises:** `ValueError` as `axis_of_each_leaf`; `TypeError` naming the path of a leaf that has
    an axis and is no array.
    """
    axes = axis_of_each_leaf("out_axes", out_axes, output)
    leaves, treedef = jtu.tree_flatten(output)
    stacked: list[Any] = []
    single: list[Any] = []
    static: list[Any] = []
    form = MappedOutput(treedef, axes, static)
    for place, (leaf, axis) in enumerate(zip(leaves, axes, strict=True)):
        is_single = axis is None and is_array_or_traced_reference(leaf)
        static.append(_array if is_single or axis is not None else leaf)
        if is_single:
            single.append(leaf)
        elif axis is not None:
            if is_reference(leaf):
                if axis != 0:
                    raise ValueError(
                        f"{form.path(place)} is a mutable array reference, which `out_axes` stacks "
                        f"along axis {axis}: references are stacked along axis 0 only."
                    )
            elif not is_array_like(leaf):
                raise TypeError(
                    f"{form.path(place)} = {leaf!r} of type {type(leaf)} is not a valid JAX type, "
                    f"but `out_axes` stacks it along axis {axis}. Its axis should be None."
                )
            stacked.append(leaf)
    return form, stacked, single
