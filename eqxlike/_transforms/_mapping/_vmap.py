"""`filter_vmap`: `jax.vmap` for functions of any arguments."""

from collections.abc import Callable, Hashable
from typing import Any, ClassVar, Unpack, overload

import jax
import jax.tree_util as jtu
from jaxtyping import PyTree

from ..._module import field
from ..._partition import UNTRACED, split_leaves
from ..._pytree import MISSING
from .._signatures import Output, Params, TransformedFunction, VmapOptions, optional_function
from ._axes import IF_ARRAY, AxisSpec, MappedOutput, axes_of_arguments, size_of_axes, take_apart


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
      function that takes a leaf of the argument and returns an axis or `None`. By default
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
