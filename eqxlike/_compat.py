"""The only file that depends on the version of JAX or uses private names of JAX.

A comment above each name says for which versions of JAX it is needed.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.core
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

# jax 0.10.2 to 0.12.0.1: `jax.core.Tracer` is public, documented for `isinstance` checks.
Tracer = jax.core.Tracer

# jax 0.10.2 to 0.12.0.1: `jax.jit` returns instances of a C++ class without a public name, so the
# class is taken from an instance. Making an instance compiles nothing and starts no backend.
PjitFunction = type(jax.jit(lambda: None))

# jax 0.10.2 to 0.12.0.1: `register_exclusion` has no public name. `jax.debug.breakpoint` skips the
# frames of JAX and of all registered files. With our files registered, `breakpoint` stops in the
# user's frame.
try:
    from jax._src.traceback_util import register_exclusion as register_exclusion
except ImportError:

    def register_exclusion(path: str) -> None:
        """Does nothing: this version of JAX has no such function."""


# jax 0.10.2 to 0.12.0.1: if a callback raises an error, JAX writes the traceback of the error to
# these loggers. If a version of JAX uses other loggers, a failed `error_if` is not only raised, but
# also logged.
CALLBACK_LOGGERS = ("jax._src.callback", "jax._src.debugging")

# jax 0.10.2: after a compiled program has failed, each call of `jax.effects_barrier` raises the
# error of this program again. At exit, Python prints the error with pages of text. jax 0.12.0.1
# raises the error only once.
try:
    from jax._src.dispatch import runtime_tokens as _runtime_tokens
except ImportError:
    _runtime_tokens = None


def forget_failed_run() -> None:
    """Stops JAX from raising the error of a failed program again."""
    try:
        jax.effects_barrier()
    except (jax.errors.JaxRuntimeError, ValueError):
        if _runtime_tokens is not None:
            _runtime_tokens.clear()


# jax 0.12.0.1: JAX plans to delete `batching.primitive_batchers` and `axis_primitive_batchers`.
# These two objects only write to `fancy_primitive_batchers`, which jax 0.10.2 also has. JAX calls
# the rules in `fancy_primitive_batchers` even if no array is batched.
def set_batching_rule(primitive: Primitive, rule: Callable[..., Any]) -> None:
    """Registers the batching rule of a primitive: `rule(axis, arrays, axes, **params)`.

    The rule is only called if at least one array is batched.
    """

    def rule_if_batched(axis: Any, arrays: Any, axes: Any, /, **params: Any) -> tuple[Any, Any]:
        if any(each is not None for each in axes):
            return rule(axis, arrays, axes, **params)
        outputs = primitive.bind(*arrays, **params)
        return outputs, [None] * len(outputs) if primitive.multiple_results else None

    batching.fancy_primitive_batchers[primitive] = rule_if_batched


# jax 0.10.2 on a CPU: XLA removes the barriers of `jax.checkpoint` before it merges common
# subexpressions. So XLA keeps values that should be recomputed. jax 0.12.0.1 recomputes these
# values.
def cpu_merges_recomputation() -> bool:
    """Whether `jax.checkpoint` saves no memory on the default backend."""
    return jax.__version_info__ < (0, 12) and jax.default_backend() == "cpu"


# jax 0.10.2: with the old emitters of XLA, programs for CPUs compile faster, but most programs run
# slower. This option does not exist in jax 0.12.0.1.
OLD_EMITTERS: dict[str, Any] = (
    {"xla_cpu_use_fusion_emitters": False} if jax.__version_info__ < (0, 11) else {}
)


# jax 0.10.2 stores these counts as two numbers; in jax 0.12.0.1, they are the lengths of two trees.
def scan_counts(params: Any) -> tuple[int, int]:
    """The number of constants and the number of carried values among the operands of a `scan`."""
    if "num_consts" in params:
        return params["num_consts"], params["num_carry"]
    consts, carry, _ = map(list, params["ft_in"].unpack())
    return len(consts), len(carry)


# jax 0.10.2 to 0.12.0.1: an undocumented attribute of an array's type has the mesh axes along which
# the array varies.
def varying_axes(array: Any) -> frozenset[Any]:
    """The axes of `jax.shard_map` along which the devices may hold different values."""
    return getattr(manual_axis_type(array), "varying", frozenset())


def manual_axis_type(array: Any) -> Any:
    """The argument `manual_axis_type` of `jax.ShapeDtypeStruct` for an array, or `None`."""
    return getattr(getattr(array, "aval", array), "manual_axis_type", None)


def vary(array: Any, axes: frozenset[Any]) -> Any:
    """Casts an array so that JAX treats it as varying along these axes of `jax.shard_map`."""
    missing = tuple(sorted(axes - varying_axes(array), key=str))
    return jax.lax.pcast(array, missing, to="varying") if missing else array


# jax 0.10.2 to 0.12.0.1: inside `jax.shard_map` with `check_vma=True`, `jax.lax.pmean` over an axis
# of `jax.vmap` fails an assertion. Over an axis of `jax.vmap` and a mesh axis together, it raises a
# `ValueError`.
def mean_over_axes(array: Any, names: tuple[Any, ...]) -> Any:
    """`jax.lax.pmean` over axes of `jax.vmap`, of `jax.shard_map`, or of both together."""
    manual = jax.sharding.get_abstract_mesh().manual_axes
    if not manual:
        return jax.lax.pmean(array, names)
    for name in names:
        index = jax.lax.axis_index(name)  # Raises `NameError` if the axis does not exist.
        if name in manual:
            array = vary(array, varying_axes(index))
        else:
            array = _mean_over_mapped.bind(array, name=name)
    mesh_axes = tuple(name for name in names if name in manual)
    return jax.lax.pmean(array, mesh_axes) if mesh_axes else array


def _batch_mean(axis: Any, arrays: Any, axes: Any, *, name: Any) -> tuple[Any, Any]:
    if axis.name == name:
        return arrays[0].mean(axes[0]), None
    return _mean_over_mapped.bind(arrays[0], name=name), axes[0]


_mean_over_mapped = Primitive("mean_over_mapped")
_mean_over_mapped.def_impl(lambda array, name: array)  # Without `vmap`, all members are equal.
_mean_over_mapped.def_abstract_eval(lambda array, name: array)
mlir.register_lowering(_mean_over_mapped, lambda context, array, name: [array])
ad.deflinear2(
    _mean_over_mapped, lambda cotangent, _, name: [_mean_over_mapped.bind(cotangent, name=name)]
)
set_batching_rule(_mean_over_mapped, _batch_mean)


# jax 0.10.2 to 0.12.0.1: undocumented attributes of the context of a lowering rule have the number
# of devices.
def is_partitioned(context: Any) -> bool:
    """Whether XLA partitions the program that is being lowered over several devices."""
    axes = context.module_context.axis_context
    mesh = getattr(axes, "mesh", None)
    if mesh is not None:
        return not set(mesh.axis_names) <= axes.manual_axes
    return getattr(axes, "num_devices", 1) != 1
