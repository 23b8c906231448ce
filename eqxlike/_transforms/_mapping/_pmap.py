"""`filter_pmap`: `jax.pmap` for functions of any arguments."""

from collections.abc import Callable, Hashable
from typing import Any, ClassVar, Literal, Unpack, overload

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
from jaxtyping import PyTree

from ..._module import Module, Wrapper, field
from ..._partition import UNTRACED, split
from ..._pytree import MISSING, is_array
from .._jit import CompilingDecorator, Lowerable, Lowered, Options, Trace, filter_jit
from .._signatures import AnyArguments, Function, Method, Output, PmapOptions, optional_function
from ._axes import IF_ARRAY, AxisSpec, MappedOutput, axes_of_arguments, size_of_axes, take_apart

_DONATE = ("all", "warn", "none")


class _Parallel(Module):
    """A function and the options of its `filter_pmap`.

    `filter_jit` compiles the method `pmap`, and provides the caches, the fast path and donation.
    """

    function: Any
    in_axes: PyTree[AxisSpec]
    out_axes: PyTree[AxisSpec]
    axis_name: Hashable = field(static=True)
    axis_size: int | None = field(static=True)
    pmap_options: Options = field(static=True)

    def pmap(self, /, *args: Any, **kwargs: Any) -> Any:
        """Flattens the arguments and calls `jax.pmap`. `filter_jit` traces this method."""
        if kwargs:
            raise RuntimeError(
                "keyword arguments cannot be used with functions wrapped with `filter_pmap`"
            )
        arrays, rest = split((self.function, args))
        axes = axes_of_arguments(self.function, self.in_axes, args)
        pairs = zip(jtu.tree_leaves(args), axes, strict=True)
        # A leaf that is not an array is passed unchanged to all devices, even if it has an axis.
        axes = [axis if is_array(leaf) else None for leaf, axis in pairs]
        size = self._check_size(size_of_axes("filter_pmap", args, axes, self.axis_size))
        # Arrays that the function holds are replicated.
        axes_of_function = [None] * len(jtu.tree_leaves(self.function))
        array_axes = [
            # `jax.pmap` mistakes a negative axis for axis 0.
            axis if axis is None else axis % array.ndim
            for array, axis in zip(arrays, rest.take(axes_of_function + axes), strict=True)
        ]
        # JAX keeps the mapped function `of_arrays` alive, so `of_arrays` must not hold a tracer.
        # `self` may hold tracers, so `of_arrays` does not refer to `self`.
        out_axes = self.out_axes
        output: MappedOutput = UNTRACED

        def of_arrays(_: jax.Array, arrays: list[Any]) -> tuple[list[Any], list[Any]]:
            nonlocal output
            function, args = rest.merge(arrays)
            output, stacked, single = take_apart(function(*args), out_axes)
            return stacked, single

        of_arrays.__name__ = getattr(self.function, "__name__", type(self.function).__name__)
        stacked, single = jax.pmap(
            of_arrays,
            axis_name=self.axis_name,
            in_axes=(0, array_axes),
            out_axes=(0, None),
            **self.pmap_options.values,
        )(jnp.arange(size), arrays)  # `jax.pmap` wants at least one array with an axis.
        return output.tree(stacked, single)

    def _check_size(self, size: int | None) -> int:
        if size is None:
            raise ValueError(
                "`filter_pmap` maps none of these arguments, so the number of devices is unknown: "
                "give an array an axis in `in_axes`, or pass `axis_size`."
            )
        options = self.pmap_options.values
        devices = options.get("devices")
        if devices is None:
            devices = jax.local_devices(backend=options.get("backend"))
        if size > len(devices):
            raise ValueError(
                f"`filter_pmap` maps axes of size {size}, one index for each device, but there are "
                f"only {len(devices)} devices. Split the axis in two: one of at most "
                f"{len(devices)} for `filter_pmap`, and one for `filter_vmap`."
            )
        return size


class CompiledMapping(Wrapper):
    """The function that `filter_shard_map` returns. `filter_pmap` returns a subclass."""

    _jitted: Any

    @property
    def __wrapped__(self) -> Any:
        return self._jitted.__wrapped__.__self__.function

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        return self._jitted(*args, **kwargs)

    def __repr__(self) -> str:
        return f"filter_{self._jitted.__wrapped__.__name__}({self.__wrapped__!r})"

    def lower(self, /, *args: Any, **kwargs: Any) -> Lowered:
        """Traces and lowers the function for these arguments, as `filter_jit(...).lower` does."""
        return self._jitted.lower(*args, **kwargs)

    @property
    def traces(self) -> tuple[Trace, ...]:
        """The latest 32 traces of the function."""
        return self._jitted.traces


class _PmapFunction(CompiledMapping):
    """The function that `filter_pmap` returns."""

    maps_arguments: ClassVar[bool] = True
    """Tells `filter_jit` not to fill in omitted defaults, since they would be mapped."""


@overload
def filter_pmap(**options: Unpack[PmapOptions]) -> CompilingDecorator: ...
@overload
def filter_pmap(
    fun: AnyArguments[Output], **options: Unpack[PmapOptions]
) -> Lowerable[Callable[..., Output]]: ...
@overload
def filter_pmap(fun: Method, **options: Unpack[PmapOptions]) -> Method: ...
@overload
def filter_pmap(fun: Function, **options: Unpack[PmapOptions]) -> Lowerable[Function]: ...
@optional_function
def filter_pmap(
    fun: Callable[..., Any] = MISSING,
    *,
    in_axes: PyTree[AxisSpec] = IF_ARRAY,
    out_axes: PyTree[AxisSpec] = IF_ARRAY,
    axis_name: Hashable = None,
    axis_size: int | None = None,
    donate: Literal["all", "warn", "none"] = "none",
    **pmapkwargs: Any,
) -> Any:
    """Runs a function on several devices at once, with one index of the mapped axes on each device.

    This is `jax.pmap` for any arguments. JAX recommends `jax.jit` with sharded arguments instead:
    see `filter_shard`. The function is compiled as by `filter_jit`: arrays are traced, everything
    else is static.

    **Arguments:**

    - `fun`, `in_axes`, `out_axes`, `axis_name`: as in `filter_vmap`, with two differences. A leaf
      that is not an array is passed unchanged, even if it has an axis. An output without an axis is
      taken from the first device.
    - `axis_size`: the number of devices; required if no argument is mapped.
    - `donate`: whether the buffers of the arguments may be reused for the output. `"all"` allows
      reuse; `"warn"` allows reuse, and shows JAX's warnings about buffers that could not be reused;
      `"none"` forbids reuse.
    - `**pmapkwargs`: passed to `jax.pmap`, such as `devices`.

    **Returns:** a function of the same arguments. Like functions compiled by `filter_jit`, it has a
    method `lower`.

    **Raises:**

    - `TypeError` if `fun` is not callable.
    - `ValueError` if `donate` is unknown, or if `static_broadcasted_argnums` or `donate_argnums` is
      passed.
    - `ValueError`, when called, if the size of the mapped axes exceeds the number of devices.
    - The errors of `filter_vmap`, when called.

    !!! example

        >>> import eqxlike as eqx, jax, jax.numpy as jnp
        >>> @eqx.filter_pmap(axis_name="devices")
        ... def share(x, label):
        ...     return (x / jax.lax.psum(x, "devices")).sum(), label
        >>> shares, label = share(jnp.ones((jax.device_count(), 1)), "of the sum")
        >>> print(round(float(shares.sum())), label)
        1 of the sum
    """
    if donate not in _DONATE:
        words = ", ".join(map(repr, _DONATE))
        raise ValueError(
            f"`filter_pmap(..., donate=...)` must be one of {words}; it is {donate!r}."
        )
    for name in ("static_broadcasted_argnums", "donate_argnums"):
        if name in pmapkwargs:
            raise ValueError(
                f"`filter_pmap` does not take `{name}`: everything that is not an array is "
                "already static, and `donate` selects whether buffers are donated."
            )
    parallel = _Parallel(fun, in_axes, out_axes, axis_name, axis_size, Options(pmapkwargs))
    return _PmapFunction(filter_jit(parallel.pmap, donate=donate))
