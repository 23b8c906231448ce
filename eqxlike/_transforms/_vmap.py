"""`filter_vmap`: `jax.vmap` for functions of any arguments; and the axes of `filter_pmap`."""

import dataclasses
import inspect
from collections.abc import Callable, Hashable
from typing import Any, ClassVar, NamedTuple, Unpack, overload

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
from jaxtyping import PyTree

from .._module import field
from .._partition import UNTRACED, split_leaves
from .._pytree import (
    MISSING,
    is_array,
    is_array_like,
    is_array_or_traced_reference,
    is_reference,
    tree_pformat,
)
from ._flat_call import path_of
from ._signatures import Output, Params, TransformedFunction, VmapOptions, optional_function

AxisSpec = int | None | Callable[[Any], int | None]


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


class _VmapFunction(TransformedFunction):
    """The function that `filter_vmap` returns."""

    maps_arguments: ClassVar[bool] = True
    """Tells `filter_jit` not to fill in omitted defaults, since they would be mapped."""

    _in_axes: PyTree[AxisSpec]
    _out_axes: PyTree[AxisSpec]
    _axis_name: Hashable = field(static=True)
    _axis_size: int | None = field(static=True)
    _vmap_options: tuple[tuple[str, Any], ...] = field(static=True)

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        if kwargs:
            raise RuntimeError(
                "keyword arguments cannot be used with functions wrapped with `filter_vmap`"
            )
        in_axes = axes_of_arguments(self._function, self._in_axes, args)
        size = size_of_axes("filter_vmap", args, in_axes, self._axis_size)
        leaves, treedef = jtu.tree_flatten(args)
        mapped, rest = split_leaves(leaves, treedef, [axis is not None for axis in in_axes])
        output: MappedOutput = UNTRACED

        def of_mapped(mapped: list[Any]) -> tuple[list[Any], list[Any]]:
            nonlocal output
            returned = self._function(*rest.merge(mapped))
            output, stacked, single = take_apart(returned, self._out_axes)
            return stacked, single

        if size is None:
            # Nothing is mapped, so the function runs once, and no output may have an axis.
            stacked, single = of_mapped([])
            if stacked:
                raise ValueError(
                    "Cannot resolve batch dimension. Non-`None` `out_axes` requires either "
                    "`in_axes` or `axis_size` to be not `None`."
                )
        else:
            try:
                stacked, single = jax.vmap(
                    of_mapped,
                    in_axes=(rest.take(in_axes),),
                    out_axes=(0, None),
                    axis_name=self._axis_name,
                    axis_size=size,
                    **dict(self._vmap_options),
                )(mapped)
            except ValueError as error:
                paths = [] if output is UNTRACED else output.paths_of_single()
                if not paths:
                    raise
                raise _name_batched(error, paths) from None
        return output.tree(stacked, single)


def _name_batched(error: ValueError, paths: list[str]) -> ValueError:
    """Replaces JAX's error about a batched output with axis `None` by an error that names the path.

    JAX's own error has only an index: the position of the array among the flat outputs.

    **Arguments:**

    - `paths`: the paths of all output arrays with axis `None` in `out_axes`.
    """
    named = [path for place, path in enumerate(paths) if f"[1][{place}]," in str(error)]
    return ValueError(
        f"{' or '.join(named or paths)} has no axis in `out_axes` (axis spec None but output was "
        "batched): it depends on mapped arguments, so it differs from index to index. Give it an "
        "axis in `out_axes`, or make it equal for all indices with a collective operation over "
        "`axis_name`, such as `jax.lax.pmean`."
    )


@overload
def filter_vmap(
    **options: Unpack[VmapOptions],
) -> Callable[[Callable[Params, Output]], Callable[Params, Output]]: ...
@overload
def filter_vmap(
    fun: Callable[Params, Output], **options: Unpack[VmapOptions]
) -> Callable[Params, Output]: ...
@optional_function
def filter_vmap(
    fun: Callable[..., Any] = MISSING,
    *,
    in_axes: PyTree[AxisSpec] = IF_ARRAY,
    out_axes: PyTree[AxisSpec] = IF_ARRAY,
    axis_name: Hashable = None,
    axis_size: int | None = None,
    **vmapkwargs: Any,
) -> Any:
    """Vectorises a function over an axis of the arrays in its arguments.

    **Arguments:**

    - `fun`: a function of positional arguments, which are pytrees. Without it, a decorator is
      returned. Arrays that `fun` itself holds are not mapped.
    - `in_axes`: a prefix of the tuple of arguments, or a dictionary from parameter names to
      prefixes of the arguments. Each leaf of a prefix is an axis, or `None` for "not mapped", or a
      function that takes a leaf of the argument and returns an axis or `None`. A Module in a prefix
      has axes as its leaves, but a callable Module counts as a function. By default
      `if_array(0)`: axis 0 of each array is mapped, and other leaves are not.
    - `out_axes`: a prefix of the output, with leaves as in `in_axes`; by default `if_array(0)`.
      Outputs with an axis are stacked along this axis. A Python number with an axis becomes an
      array first. An array whose axis is `None` must not depend on mapped arrays.
    - `axis_name`: a name for collective operations over the axis.
    - `axis_size`: the size of the axis; required if no argument is mapped.
    - `**vmapkwargs`: passed to `jax.vmap`.

    **Returns:** a function of the same arguments.

    **Raises:** when the returned function is called:

    - `RuntimeError` if a keyword argument is passed.
    - `ValueError` if an axis has the wrong type or is out of bounds, or if the sizes of the mapped
      axes differ.
    - `ValueError` if a name in `in_axes` belongs to no argument.
    - `ValueError` if no argument is mapped and `axis_size` is missing.
    - `ValueError` if an array whose axis in `out_axes` is `None` depends on mapped arrays.
    - `TypeError` if a leaf that is not an array has an axis.

    !!! example

        >>> import eqxlike as eqx, jax.numpy as jnp
        >>> def scale(x, factor, label):
        ...     return factor * x, label
        >>> print(*eqx.filter_vmap(scale, in_axes=(0, None, None))(jnp.arange(3), 2, "doubled"))
        [0 2 4] doubled
    """
    return _VmapFunction(
        fun, in_axes, out_axes, axis_name, axis_size, tuple(sorted(vmapkwargs.items()))
    )


# --- The axis of each leaf, from the prefixes `in_axes` and `out_axes` ---


_MAX_SHOWN = 3
"""An error message lists at most this many arrays of the same size."""


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
    leaves = jtu.tree_leaves(args)
    for place, (leaf, axis) in enumerate(zip(leaves, axes, strict=True)):
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
        raise ValueError("\n".join(lines))
    return next(iter(sizes), None)


def _path(args: tuple[Any, ...], place: int) -> str:
    # The path is read from `args`, since a node may check its children when it is unflattened.
    path, _ = jtu.tree_leaves_with_path(args)[place]
    return f"args{jtu.keystr(path)}"


# --- The output of a mapped function: leaves with an axis, and leaves without ---


_REMOVED = object()
"""Replaces each array in `MappedOutput.static`."""


class MappedOutput(NamedTuple):
    """The output of a mapped function, without its arrays.

    JAX needs the output axes before the function runs, but they are known only afterwards. So all
    output leaves with an axis are first stacked along axis 0. Then `tree` moves axis 0 to the axis
    that the user asked for.

    - `axes`: the axis of each leaf.
    - `static`: each leaf, with `_REMOVED` in place of each array.
    """

    treedef: Any
    axes: list[int | None]
    static: list[Any]

    def tree(self, stacked: list[Any], single: list[Any]) -> PyTree:
        """The output of the transformed function."""
        next_stacked, next_single = iter(stacked), iter(single)
        leaves = []
        for leaf, axis in zip(self.static, self.axes, strict=True):
            if leaf is _REMOVED:
                array = next(next_single if axis is None else next_stacked)
                leaf = jnp.moveaxis(array, 0, axis) if axis else array
            leaves.append(leaf)
        return self.treedef.unflatten(leaves)

    def paths_of_single(self) -> list[str]:
        """The paths of the arrays that are not mapped over an axis."""
        return [
            f"output{path_of(place, self.treedef)}"
            for place, (leaf, axis) in enumerate(zip(self.static, self.axes, strict=True))
            if leaf is _REMOVED and axis is None
        ]


def take_apart(
    output: PyTree, out_axes: PyTree[AxisSpec]
) -> tuple[MappedOutput, list[Any], list[Any]]:
    """Splits an output into its structure, the leaves to stack, and the arrays without an axis.

    **Raises:** the errors of `axis_of_each_leaf`; `TypeError` with the path of a leaf that has
    an axis but is not an array; `ValueError` with the path of an array whose axis is out of bounds.
    """
    axes = axis_of_each_leaf("out_axes", out_axes, output)
    leaves, treedef = jtu.tree_flatten(output)
    stacked: list[Any] = []
    single: list[Any] = []
    static: list[Any] = []
    for place, (leaf, axis) in enumerate(zip(leaves, axes, strict=True)):
        if axis is None:
            is_single = is_array_or_traced_reference(leaf)
            static.append(_REMOVED if is_single else leaf)
            if is_single:
                single.append(leaf)
            continue
        if is_reference(leaf):
            if axis != 0:
                raise ValueError(
                    f"output{path_of(place, treedef)} is a mutable array reference, which "
                    f"`out_axes` stacks along axis {axis}: references are stacked along axis 0 "
                    "only."
                )
        elif not is_array_like(leaf):
            raise TypeError(
                f"output{path_of(place, treedef)} = {leaf!r} of type {type(leaf)} is not a valid "
                f"JAX type, but `out_axes` stacks it along axis {axis}. Its axis should be None."
            )
        elif axis != 0:
            rank = jnp.ndim(leaf) + 1
            if not -rank <= axis < rank:
                raise ValueError(
                    f"`out_axes` stacks output{path_of(place, treedef)} along axis {axis}: axis "
                    f"{axis} is out of bounds for array of dimension {rank}, including the new "
                    "axis."
                )
        static.append(_REMOVED)
        stacked.append(leaf)
    return MappedOutput(treedef, axes, static), stacked, single
