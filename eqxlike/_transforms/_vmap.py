"""Vectorisation of functions of any arguments."""

import functools
from collections.abc import Callable, Hashable
from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
from jaxtyping import PyTree

from .._module import Module, Wrapper, bind, field
from .._pytree import is_array

AxisSpec = int | None | Callable[[Any], int | None]

_missing: Any = object()


class if_array(Module):
    """An axis specification: `axis` for arrays, `None` for everything else.

    >>> import jax.numpy as jnp
    >>> if_array(0)(jnp.ones(3)), if_array(0)("text")
    (0, None)
    """

    axis: int

    def __call__(self, leaf: Any) -> int | None:
        return self.axis if is_array(leaf) else None


_IF_ARRAY = if_array(axis=0)


class _VmapFunction(Wrapper):
    """What `filter_vmap` returns."""

    _function: Any
    _in_axes: PyTree[AxisSpec]
    _out_axes: PyTree[AxisSpec]
    _axis_name: Hashable = field(static=True)
    _axis_size: int | None = field(static=True)
    _vmap_options: tuple[tuple[str, Any], ...] = field(static=True)

    @property
    def __wrapped__(self) -> Any:
        return self._function

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        if kwargs:
            raise RuntimeError(
                "keyword arguments cannot be used with functions wrapped with `filter_vmap`"
            )
        in_axes = _axis_of_each_leaf("in_axes", self._in_axes, args)
        leaves, treedef = jtu.tree_flatten(args)
        outcome_of_trace: list[_Outcome] = []

        def of_mapped(mapped: list[Any]) -> tuple[list[Any], list[Any]]:
            source = iter(mapped)
            filled = [
                leaf if axis is None else next(source)
                for leaf, axis in zip(leaves, in_axes, strict=True)
            ]
            returned = self._function(*treedef.unflatten(filled))
            outcome, stacked, single = _take_apart(returned, self._out_axes)
            outcome_of_trace[:] = [outcome]
            return stacked, single

        mapped = [leaf for leaf, axis in zip(leaves, in_axes, strict=True) if axis is not None]
        mapped_axes = [axis for axis in in_axes if axis is not None]
        if not mapped and self._axis_size is None:
            stacked, single = of_mapped([])
            if stacked:
                raise ValueError(
                    "Cannot resolve batch dimension. Non-`None` `out_axes` requires either "
                    "`in_axes` or `axis_size` to be not `None`."
                )
        else:
            stacked, single = jax.vmap(
                of_mapped,
                in_axes=(mapped_axes,),
                out_axes=(0, None),
                axis_name=self._axis_name,
                axis_size=self._axis_size,
                **dict(self._vmap_options),
            )(mapped)
        return outcome_of_trace[0].tree(stacked, single)

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return self if instance is None else bind(self, instance)


class _Outcome:
    """The form of what a mapped function returned; of its leaves only those that are no arrays.

    The axes are known only once the function has run, while `jax.vmap` asks for them before: so
    all leaves are stacked along axis 0, and the axis moved afterwards.
    """

    def __init__(self, treedef: Any, axes: list[int | None], static: list[Any]):
        self.treedef = treedef
        self.axes = axes
        self.static = static

    def tree(self, stacked: list[Any], single: list[Any]) -> PyTree:
        next_stacked, next_single = iter(stacked), iter(single)
        leaves = []
        for static, axis in zip(self.static, self.axes, strict=True):
            if axis is not None:
                array = next(next_stacked)
                leaves.append(array if axis == 0 else jnp.moveaxis(array, 0, axis))
            else:
                leaves.append(next(next_single) if static is _array else static)
        return self.treedef.unflatten(leaves)


_array = object()


def _take_apart(
    outcome: PyTree, out_axes: PyTree[AxisSpec]
) -> tuple[_Outcome, list[Any], list[Any]]:
    """The form of `outcome`, its leaves to stack, and its arrays that are the same for all."""
    axes = _axis_of_each_leaf("out_axes", out_axes, outcome)
    leaves, treedef = jtu.tree_flatten(outcome)
    stacked = [leaf for leaf, axis in zip(leaves, axes, strict=True) if axis is not None]
    single = [
        leaf for leaf, axis in zip(leaves, axes, strict=True) if axis is None and is_array(leaf)
    ]
    static = [
        _array if is_array(leaf) or axis is not None else leaf
        for leaf, axis in zip(leaves, axes, strict=True)
    ]
    return _Outcome(treedef, axes, static), stacked, single


def _axis_of_each_leaf(name: str, spec: PyTree[AxisSpec], tree: PyTree) -> list[int | None]:
    """Spreads the prefix `spec` over `tree`."""
    axes: list[int | None] = []

    def spread(spec: AxisSpec, subtree: PyTree) -> None:
        for leaf in jtu.tree_leaves(subtree):
            axis = spec(leaf) if callable(spec) else spec
            # `True` is an `int` to Python and a slip to whoever wrote it.
            if axis is not None and type(axis) is not int:
                raise ValueError(
                    "`in_axes` and `out_axes` must consist of None, ints, and callables only; "
                    f"`{name}` has {axis!r} of type {type(axis).__name__}."
                )
            axes.append(axis)

    # A callable Module, such as `if_array`, is one specification and not a tree of them.
    jtu.tree_map(spread, spec, tree, is_leaf=lambda node: node is None or callable(node))
    return axes


def filter_vmap(
    fun: Any = _missing,
    *,
    in_axes: PyTree[AxisSpec] = _IF_ARRAY,
    out_axes: PyTree[AxisSpec] = _IF_ARRAY,
    axis_name: Hashable = None,
    axis_size: int | None = None,
    **vmapkwargs: Any,
) -> Any:
    """Vectorises a function over an axis of the arrays in its arguments.

    **Arguments:**

    - `fun`: a function of positional arguments, any pytrees. Left out, this is a decorator with
        arguments. The arrays of `fun` itself are not mapped.
    - `in_axes`: a prefix of the tuple of arguments, of which each leaf is an axis, `None` for
        "not mapped", or a function from leaf to one of these. By default axis 0 of each array.
    - `out_axes`: the same for what `fun` returns. What has an axis is stacked; a Python number
        is made an array first. Arrays without must not depend on mapped ones.
    - `axis_name`: a name for collective operations over the axis.
    - `axis_size`: the size of the axis, needed if nothing is mapped.
    - `**vmapkwargs`: passed to `jax.vmap`.

    **Returns:** a function of the same arguments.

    **Raises:** when called: `RuntimeError` for keyword arguments; `ValueError` if an axis is of
    another kind, or sizes differ, or none is known.

    !!! example

        >>> import eqxlike as eqx, jax.numpy as jnp
        >>> def scale(x, factor, label):
        ...     return factor * x, label
        >>> print(*eqx.filter_vmap(scale, in_axes=(0, None, None))(jnp.arange(3), 2, "doubled"))
        [0 2 4] doubled
    """
    options = {
        "in_axes": in_axes,
        "out_axes": out_axes,
        "axis_name": axis_name,
        "axis_size": axis_size,
    }
    if fun is _missing:
        return functools.partial(filter_vmap, **options, **vmapkwargs)
    if not callable(fun):
        raise TypeError(f"{fun!r} is not a callable object: `filter_vmap` expects a function.")
    return _VmapFunction(
        fun, in_axes, out_axes, axis_name, axis_size, tuple(sorted(vmapkwargs.items()))
    )
