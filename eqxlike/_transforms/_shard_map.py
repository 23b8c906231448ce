"""`filter_pmap` and `filter_shard_map`: a function runs on several devices.

Each device gets its shards of the arrays. `filter_jit` compiles these functions, and provides the
caches, the fast path and donation.
"""

import inspect
import math
from collections.abc import Callable, Hashable, Iterator
from collections.abc import Set as AbstractSet
from typing import Any, ClassVar, Literal, Required, TypedDict, Unpack, overload

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import PyTree

from .._module import Module, Wrapper, field
from .._partition import UNTRACED, split
from .._pytree import MISSING, is_array, listed
from ._checks import mesh_of
from ._flat_call import FlatCall, shardings_of_arrays
from ._jit._filter_jit import CompilingDecorator, Lowerable, Lowered, Options, filter_jit
from ._jit._traces import Trace
from ._signatures import (
    AnyArguments,
    Function,
    Method,
    Output,
    Params,
    PmapOptions,
    optional_function,
)
from ._vmap import IF_ARRAY, AxisSpec, MappedOutput, axes_of_arguments, size_of_axes, take_apart

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


# --- Shards of arrays on a mesh of devices ---


Specs = PyTree[PartitionSpec | None]

_ANY = inspect.signature(lambda *args, **kwargs: None)


class _Sharded(Module):
    """A function and the options of its `filter_shard_map`.

    `filter_jit` compiles the method `shard_map`, and provides the caches and the fast path.
    """

    function: Any
    mesh: Mesh | AbstractMesh | None = field(static=True)
    in_specs: Specs
    out_specs: Specs
    axis_names: frozenset[Hashable] = field(static=True)
    check_vma: bool = field(static=True)

    def shard_map(self, /, *args: Any, **kwargs: Any) -> Any:
        """Flattens the arguments and calls `jax.shard_map`. `filter_jit` traces this method."""
        mesh = self.mesh if self.mesh is not None else jax.sharding.get_abstract_mesh()
        if mesh.empty:
            raise ValueError(
                "`filter_shard_map` has no mesh: pass `mesh=`, such as `jax.make_mesh((2,), "
                '("data",))`, or call the function inside `with jax.set_mesh(mesh):`.'
            )
        context = mesh_of(filter(is_array, jtu.tree_leaves((self.function, args, kwargs))))
        kinds = () if context is None else context.axis_types
        if isinstance(mesh, Mesh) and all(kind == AxisType.Auto for kind in kinds):
            # JAX cannot differentiate a program that has explicit mesh axes and is compiled for one
            # device. So all axes of the mesh become automatic here. Arrays that a call returns also
            # have automatic axes. So these arrays can be passed to the next call.
            automatic = (AxisType.Auto,) * len(mesh.axis_names)
            mesh = Mesh(mesh.devices, mesh.axis_names, axis_types=automatic)
        try:
            signature = inspect.signature(self.function)
        except (TypeError, ValueError):  # a function in C
            signature = _ANY
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        # Arrays that the function holds are replicated.
        in_specs = [PartitionSpec() for leaf in jtu.tree_leaves(self.function) if is_array(leaf)]
        for name, argument, specs in self._specs_of_arguments(bound):
            in_specs += self._specs_of_arrays("in_specs", name, argument, specs, mesh)

        def function(function: Any, arguments: list[tuple[str, Any]]) -> Any:
            given = inspect.BoundArguments(signature, dict(arguments))  # pyright: ignore
            return function(*given.args, **given.kwargs)

        # This must be a list, since JAX would sort the keys of a dictionary.
        arguments = list(bound.arguments.items())
        name = "a function of `filter_shard_map`"
        call = FlatCall(function, (self.function, arguments), {}, name)

        def of_arrays(arrays: list[Any]) -> PyTree:
            output = call.output(call.of_arrays(arrays))
            self._specs_of_arrays("out_specs", "the output", output, self.out_specs, mesh)
            return jtu.tree_map(lambda leaf: leaf if is_array(leaf) else None, output)

        of_arrays.__name__ = getattr(self.function, "__name__", type(self.function).__name__)
        sharded = jax.shard_map(
            of_arrays,
            mesh=None if self.mesh is None else mesh,
            in_specs=(in_specs,),
            out_specs=jtu.tree_map(_as_spec, self.out_specs, is_leaf=lambda node: node is None),
            axis_names=self.axis_names,
            check_vma=self.check_vma,
        )
        arrays = call.arrays
        if AxisType.Explicit in mesh.axis_types:
            # JAX does not reshard along explicit axes by itself, so reshard here.
            shardings = [NamedSharding(mesh, spec) for spec in in_specs]
            arrays = jax.sharding.reshard(arrays, shardings)
        return call.output(jtu.tree_leaves(sharded(arrays)))

    def _specs_of_arguments(
        self, bound: inspect.BoundArguments
    ) -> Iterator[tuple[str, Any, Specs]]:
        """The name, the value and the specs of each argument, in the order of the leaves."""
        specs, parameters = self.in_specs, bound.signature.parameters
        is_by_name = isinstance(specs, dict)
        arguments: list[tuple[str, Any]] = []
        for name, value in bound.arguments.items():
            kind = parameters[name].kind
            if kind is inspect.Parameter.VAR_KEYWORD:
                arguments += sorted(value.items())
            elif kind is inspect.Parameter.VAR_POSITIONAL and not is_by_name:
                arguments += [(f"{name}[{place}]", each) for place, each in enumerate(value)]
            else:
                arguments.append((name, value))
        names = [name for name, _ in arguments]
        unknown: list[Any] = []
        if is_by_name:
            unknown = [name for name in specs if name not in names]
        elif isinstance(specs, tuple | list):
            unknown = list(specs[len(names) :])
            specs = dict(zip(names, specs, strict=False))
        else:
            specs = dict.fromkeys(names, specs)
        if unknown:
            raise ValueError(
                f"`in_specs` of `filter_shard_map` has {listed(list(map(repr, unknown)))}, which "
                f"belongs to no argument: the arguments are {', '.join(names) or 'none'}."
            )
        for name, value in arguments:
            if name in specs:
                yield name, value, specs[name]
            elif any(map(is_array, jtu.tree_leaves(value))):
                raise ValueError(
                    f"`in_specs` of `filter_shard_map` has no spec for the argument {name}, which "
                    "has arrays: add one, such as `PartitionSpec()`, which replicates it."
                )

    def _specs_of_arrays(
        self, which: str, name: str, tree: PyTree, specs: Specs, mesh: Mesh | AbstractMesh
    ) -> list[PartitionSpec]:
        """The spec of each array in a tree. Raises `ValueError` if a spec does not fit an array."""
        found = shardings_of_arrays(f"{which}` for `{name}", specs, tree, is_array)
        arrays = [each for each in jtu.tree_leaves_with_path(tree) if is_array(each[1])]
        for (path, array), spec in zip(arrays, found, strict=True):
            if why := self._spec_error(array.shape, _as_spec(spec), mesh, which == "in_specs"):
                raise ValueError(
                    f"`{which}` of `filter_shard_map` has {spec!r} for {name}{jtu.keystr(path)}, "
                    f"of shape {array.shape}, on a mesh of {dict(mesh.shape)}: {why}."
                )
        return list(map(_as_spec, found))

    def _spec_error(
        self, shape: tuple[int, ...], spec: Any, mesh: Mesh | AbstractMesh, is_split: bool
    ) -> str:
        """The reason why a spec does not fit an array, as text; `""` if it fits."""
        if not isinstance(spec, PartitionSpec):
            return "expected a `jax.sharding.PartitionSpec`, or `None` to replicate the array"
        if len(spec) > len(shape):
            return f"the spec has {len(spec)} entries, but the array has {len(shape)} axes"
        for axis, entry in enumerate(spec):
            names = () if entry is None else entry if isinstance(entry, tuple) else (entry,)
            for name in names:
                if name not in mesh.shape:
                    return f"the mesh has no axis {name!r}"
                if self.axis_names and name not in self.axis_names:
                    return f"the axis {name!r} is not one of `axis_names`"
            num_parts = math.prod(mesh.shape[name] for name in names)
            if is_split and shape[axis] % num_parts:
                return f"axis {axis} of the array cannot be split into {num_parts} equal parts"
        return ""


def _as_spec(spec: Any) -> Any:
    return PartitionSpec() if spec is None else spec


class _Options(TypedDict, total=False):
    """The options of `filter_shard_map`."""

    mesh: Mesh | AbstractMesh | None
    in_specs: Required[Specs]
    out_specs: Required[Specs]
    axis_names: AbstractSet[Hashable]
    check_vma: bool


@overload
def filter_shard_map(
    **options: Unpack[_Options],
) -> Callable[[Callable[Params, Output]], Callable[Params, Output]]: ...
@overload
def filter_shard_map(
    fun: Callable[Params, Output], **options: Unpack[_Options]
) -> Callable[Params, Output]: ...
@optional_function
def filter_shard_map(
    fun: Callable[..., Any] = MISSING,
    *,
    mesh: Mesh | AbstractMesh | None = None,
    in_specs: Specs,
    out_specs: Specs,
    axis_names: AbstractSet[Hashable] = frozenset(),
    check_vma: bool = True,
) -> Any:
    """Runs a function on each device of a mesh, with the device's shards of the arrays.

    This is `jax.shard_map` for any arguments: leaves that are not arrays pass through unchanged.
    The function is compiled as by `filter_jit`: arrays are traced, everything else is static.

    **Arguments:**

    - `fun`: a function of any arguments that returns any pytree. Without it, a decorator is
      returned. Arrays of `fun` itself, such as the weights of a Module, are replicated.
    - `mesh`: the devices. By default, the mesh of `jax.set_mesh`.
    - `in_specs`: a `jax.sharding.PartitionSpec` for all arrays; or a tuple with one entry for each
      argument, in the order of the parameters; or a dictionary from parameter names to entries.
      Each entry is a `PartitionSpec`, or a prefix of its argument with a `PartitionSpec` at each
      leaf. `None` replicates an array. An argument without arrays needs no spec.
    - `out_specs`: a prefix of the output with a spec at each leaf. `None` replicates an array.
    - `axis_names`: the axes of the mesh that may be named in the specs and in collective operations
      of the function. By default, all axes.
    - `check_vma`: whether JAX checks that replicated outputs are equal on all devices, and sums the
      gradients of replicated inputs over the devices.

    **Returns:** a function of the same arguments. Like functions compiled by `filter_jit`, it has a
    method `lower`.

    **Raises:**

    - `TypeError` if `fun` is not callable.
    - `ValueError`, when called, if there is no mesh.
    - `ValueError`, when called, if an argument with arrays has no spec, or if a spec belongs to no
      argument.
    - `ValueError`, when called, if a spec does not fit its array. The message has the path and the
      shape of the array.
    - JAX's own `ValueError` if `out_specs` replicates an output that may differ between devices.

    !!! example

        >>> import eqxlike as eqx, jax, jax.numpy as jnp
        >>> from jax.sharding import PartitionSpec as P
        >>> mesh = jax.make_mesh((jax.device_count(),), ("data",))
        >>> @eqx.filter_shard_map(mesh=mesh, in_specs={"x": P("data")}, out_specs=(P(), None))
        ... def mean(x, label):
        ...     return jax.lax.pmean(x.mean(), "data"), label
        >>> print(*mean(jnp.arange(8.0), label="average"))
        3.5 average
    """
    sharded = _Sharded(fun, mesh, in_specs, out_specs, frozenset(axis_names), check_vma)
    return CompiledMapping(filter_jit(sharded.shard_map))
