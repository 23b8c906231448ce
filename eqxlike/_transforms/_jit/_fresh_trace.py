"""`fresh_trace`: traces a function even if it has been traced before."""

import contextlib
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax.tree_util as jtu

from ..._compat import PjitFunction
from ..._traceback import hide_our_frames
from .._flat_call import is_array_or_struct
from ._dispatch import CompiledFunction
from ._filter_jit import JitFunction, filter_jit, find_dispatcher


class FreshTrace(NamedTuple):
    """The result of `fresh_trace`.

    - `traced`: the traced function, a `jax.stages.Traced`.
    - `lowered`: the lowered function, a `jax.stages.Lowered`, or `None`.
    - `paths`: the path of each array in the arguments.
    - `trace_s`, `lower_s`: the seconds for tracing and lowering.
    """

    traced: Any
    lowered: Any
    paths: tuple[str, ...]
    trace_s: float
    lower_s: float


def fresh_trace(
    function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], *, is_lowered: bool = True
) -> FreshTrace:
    """Traces and lowers `function(*args, **kwargs)` as `filter_jit` does, but records no trace.

    **Arguments:**

    - `function`: any callable. A function compiled by `filter_jit` keeps its options; a function
      compiled by `jax.jit` is traced directly.
    - `args`, `kwargs`: the arguments; a `jax.ShapeDtypeStruct` may replace an array.
    - `is_lowered`: whether to lower the function; otherwise `lowered` is `None`.
    """
    if isinstance(function, PjitFunction):
        return _timed(lambda: function.trace(*args, **kwargs), is_lowered)
    wrapper: Any = function if isinstance(function, JitFunction) else filter_jit(function)
    dispatcher, bound, bound_kwargs = find_dispatcher(wrapper)
    ordered, names = dispatcher.order.arrange(bound + args, {**bound_kwargs, **kwargs})
    arrays, cached = dispatcher.find(ordered, names, with_abstract=True)
    unrecorded = dispatcher.history.emptied()
    compiled = CompiledFunction(dispatcher, cached.key, ordered, unrecorded)
    try:
        with compiled.donation_warnings or contextlib.nullcontext():
            found = _timed(lambda: compiled.traced_jit(arrays).trace(*arrays), is_lowered)
    except Exception as error:
        hide_our_frames(error)
        raise
    num_bound = dispatcher.num_bound
    labels = [""] * num_bound + dispatcher.order.labels(len(ordered), names)[num_bound:]
    paths = [
        label + jtu.keystr(path)
        for label, arg in zip(labels, ordered, strict=True)
        for path, leaf in jtu.tree_leaves_with_path(arg)
        if is_array_or_struct(leaf)
    ]
    return found._replace(paths=_one_each(paths, len(arrays)))


def _timed(trace: Callable[[], Any], is_lowered: bool) -> FreshTrace:
    start_s = time.perf_counter()
    traced = trace()
    traced_s = time.perf_counter()
    lowered = traced.lower() if is_lowered else None
    lowered_s = time.perf_counter()
    jaxpr = traced.jaxpr.jaxpr
    paths = _one_each(jaxpr.debug_info.arg_names or (), len(jaxpr.invars))
    return FreshTrace(traced, lowered, paths, traced_s - start_s, lowered_s - traced_s)


def _one_each(paths: Sequence[str], num_arrays: int) -> tuple[str, ...]:
    """Returns `paths` if there is one for each array, else the names "array 0", "array 1", ..."""
    is_known = len(paths) == num_arrays
    return tuple(paths) if is_known else tuple(f"array {i}" for i in range(num_arrays))
