"""The only file that knows JAX versions or touches anything not public in JAX.

Each name says which JAX versions need it. Everything else in the package imports public JAX.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.core
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

# jax 0.10.2 to 0.12.0.1: `jax.core.Tracer` is public, documented for `isinstance` checks.
Tracer = jax.core.Tracer

# jax 0.10.2 to 0.12.0.1: the class of what `jax.jit` returns is one of JAX's C++ extension without
# a public name, so it is taken from an instance. Making one compiles nothing and starts no backend.
PjitFunction = type(jax.jit(lambda: None))

# jax 0.10.2 to 0.12.0.1: `register_exclusion` has no public name. `jax.debug.breakpoint` stops in
# the innermost frame that is neither JAX's nor in a file registered here. Without it, it would stop
# in a frame of ours rather than the user's.
try:
    from jax._src.traceback_util import register_exclusion as register_exclusion
except ImportError:

    def register_exclusion(path: str) -> None:
        """Does nothing: this JAX has nothing to register with."""


# jax 0.10.2 to 0.12.0.1: JAX logs the traceback of each callback that raises under these names. In
# a version that uses others, a failed check of `error_if` is logged as well as raised.
CALLBACK_LOGGERS = ("jax._src.callback", "jax._src.debugging")

# jax 0.10.2: once a run has failed, `jax.effects_barrier` raises for it at each call, and Python as
# it exits, with pages of text. jax 0.12.0.1 forgets the run when it has raised for it once.
try:
    from jax._src.dispatch import runtime_tokens as _runtime_tokens
except ImportError:
    _runtime_tokens = None


def forget_failed_run() -> None:
    """Keeps JAX from raising once more for a run whose error has been raised."""
    try:
        jax.effects_barrier()
    except (jax.errors.JaxRuntimeError, ValueError):
        if _runtime_tokens is not None:
            _runtime_tokens.clear()


# jax 0.12.0.1: `batching.primitive_batchers` and `axis_primitive_batchers` are shims that JAX means
# to delete. What they write to is there in jax 0.10.2 too. It is also asked for arrays that are not
# batched.
def set_batching_rule(primitive: Primitive, rule: Callable[..., Any]) -> None:
    """Has `jax.vmap` call `rule(axis, arrays, axes, **params)` for what is batched."""

    def of_any(axis: Any, arrays: Any, axes: Any, /, **params: Any) -> tuple[Any, Any]:
        if any(each is not None for each in axes):
            return rule(axis, arrays, axes, **params)
        outputs = primitive.bind(*arrays, **params)
        return outputs, [None] * len(outputs) if primitive.multiple_results else None

    batching.fancy_primitive_batchers[primitive] = of_any


# jax 0.10.2 on a CPU: XLA takes the barriers of `jax.checkpoint` away before it looks for what is
# computed twice, and so keeps what should have been computed again. In 0.12.0.1 it does not.
def cpu_merges_recomputation() -> bool:
    """Whether `jax.checkpoint` saves no memory."""
    return jax.__version_info__ < (0, 12) and jax.default_backend() == "cpu"


# jax 0.10.2: XLA compiles for CPUs faster by its old emitters, and most programs then run slower.
# The XLA of jax 0.12.0.1 has no others.
OLD_EMITTERS: dict[str, Any] = (
    {"xla_cpu_use_fusion_emitters": False} if jax.__version_info__ < (0, 11) else {}
)


# jax 0.12.0.1 says with trees what jax 0.10.2 says with two numbers.
def scan_counts(params: Any) -> tuple[int, int]:
    """How many of the operands of a `scan` are constants, and how many its carry."""
    if "num_consts" in params:
        return params["num_consts"], params["num_carry"]
    consts, carry, _ = map(list, params["ft_in"].unpack())
    return len(consts), len(carry)


# jax 0.10.2 to 0.12.0.1: the type of an array says along which axes of a mesh it varies, under a
# name that is in no page of JAX's.
def varying_axes(array: Any) -> frozenset[Any]:
    """The axes of `jax.shard_map` along which the devices may hold different values."""
    return getattr(manual_axis_type(array), "varying", frozenset())


def manual_axis_type(array: Any) -> Any:
    """The `manual_axis_type` of an array, as `jax.ShapeDtypeStruct` takes it, or `None`."""
    return getattr(getattr(array, "aval", array), "manual_axis_type", None)


def vary(array: Any, axes: frozenset[Any]) -> Any:
    """Casts an array so that it also varies, to JAX, along these axes of `jax.shard_map`."""
    missing = tuple(sorted(axes - varying_axes(array), key=str))
    return jax.lax.pcast(array, missing, to="varying") if missing else array


# jax 0.10.2 to 0.12.0.1: inside `jax.shard_map` with `check_vma=True`, `jax.lax.pmean` over an axis
# of `jax.vmap` fails an assertion; over an axis of `jax.vmap` and one of the mesh it raises
# `ValueError`.
def mean_over_axes(array: Any, names: tuple[Any, ...]) -> Any:
    """`jax.lax.pmean`, also over axes of `jax.vmap` and of `jax.shard_map` together."""
    manual = jax.sharding.get_abstract_mesh().manual_axes
    if not manual:
        return jax.lax.pmean(array, names)
    for name in names:
        index = jax.lax.axis_index(name)  # raises `NameError` if the axis does not exist
        if name in manual:
            array = vary(array, varying_axes(index))
        else:
            array = _mean_over_mapped.bind(array, name=name)
    of_mesh = tuple(name for name in names if name in manual)
    return jax.lax.pmean(array, of_mesh) if of_mesh else array


def _batch_mean(axis: Any, arrays: Any, axes: Any, *, name: Any) -> tuple[Any, Any]:
    if axis.name == name:
        return arrays[0].mean(axes[0]), None
    return _mean_over_mapped.bind(arrays[0], name=name), axes[0]


_mean_over_mapped = Primitive("mean_over_mapped")
_mean_over_mapped.def_impl(lambda array, name: array)  # not mapped: all members are equal
_mean_over_mapped.def_abstract_eval(lambda array, name: array)
mlir.register_lowering(_mean_over_mapped, lambda context, array, name: [array])
ad.deflinear2(
    _mean_over_mapped, lambda cotangent, _, name: [_mean_over_mapped.bind(cotangent, name=name)]
)
set_batching_rule(_mean_over_mapped, _batch_mean)


# jax 0.10.2 to 0.12.0.1: what a lowering rule is called with says for how many devices it lowers,
# under names that are in no page of JAX's.
def is_partitioned(context: Any) -> bool:
    """Whether XLA divides the program that is lowered among devices."""
    axes = context.module_context.axis_context
    mesh = getattr(axes, "mesh", None)
    if mesh is not None:
        return not set(mesh.axis_names) <= axes.manual_axes
    return getattr(axes, "num_devices", 1) != 1
