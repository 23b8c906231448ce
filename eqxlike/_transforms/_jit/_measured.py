"""Traces and times of `filter_jit` functions, for reports.

`fresh_trace` traces a function even if it has been traced before. `timing_calls` measures the time
of each call: inside its context, `JitFunction.__call__` and the jitted function of each fast path
are replaced by functions that measure time. Other calls have no overhead.
"""

import contextlib
import dataclasses
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.tree_util as jtu

from ..._compat import PjitFunction, Tracer
from ..._pytree import is_array_or_struct
from ..._traceback import hide_our_frames
from ._dispatch import CompiledFunction, Dispatcher
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


# --- The times of calls ---


_TRACE = "/jax/core/compile/jaxpr_trace_duration"
_COMPILING = "/jax/core/compile/"


@dataclasses.dataclass(slots=True)
class CallTimes:
    """The times of one call, in seconds.

    - `dispatcher`: the dispatcher of the function.
    - `num_traces`: the number of traces of the function.
    - `compiling_s`: the time in which JAX traced, lowered and compiled.
    - `dispatch_s`: the time until the call returned.
    - `jax_s`: the part of `dispatch_s` that the jitted function took. `None` for a call that did
      not use the fast path, such as the first call.
    - `ready_s`: the time until the result was ready. `None` if `timing_calls` does not wait for
      results.
    """

    dispatcher: Dispatcher
    num_traces: int = 0
    compiling_s: float = 0.0
    dispatch_s: float = 0.0
    jax_s: float | None = None
    ready_s: float | None = None
    result: Any = None


class _Thread(threading.local):
    call: CallTimes | None = None
    """The call that runs in this thread."""


_thread = _Thread()
_being_timed = threading.Lock()


@contextlib.contextmanager
def timing_calls(report: Callable[[CallTimes], None], wait: bool) -> Iterator[None]:
    """Context manager that passes the times of each call of a `filter_jit` function to `report`.

    A call inside the trace of another call is not reported, because its time is part of the outer
    call. A call inside a JAX transformation is not reported either.

    **Arguments:**

    - `report`: a function of one `CallTimes`. It may be called in several threads at once.
    - `wait`: whether to wait for the result of each call.

    **Raises:** `RuntimeError` if calls are already being timed.
    """
    if not _being_timed.acquire(blocking=False):
        raise RuntimeError(
            "Calls are already being timed: use one `profile` at a time, in one thread."
        )
    plain = JitFunction.__call__
    clocks = _Clocks()

    def timed(self: JitFunction, /, *args: Any, **kwargs: Any) -> Any:
        try:
            dispatcher = self._eqxlike_dispatch[0]
        except AttributeError:
            dispatcher = find_dispatcher(self)[0]
        outer = _thread.call
        _thread.call = call = CallTimes(dispatcher)
        start_s = time.perf_counter()
        try:
            output = plain(self, *args, **kwargs)
            call.dispatch_s = time.perf_counter() - start_s
        finally:
            _thread.call = outer
        if outer is not None:
            return output
        result = output if call.result is None else call.result
        if any(isinstance(leaf, Tracer) for leaf in jtu.tree_leaves(result)):
            return output
        if wait:
            waiting_s = time.perf_counter()
            jax.block_until_ready(result)
            call.ready_s = call.dispatch_s + time.perf_counter() - waiting_s
        if call.jax_s is None:
            clocks.put_into(dispatcher)
        call.result = None
        report(call)
        return output

    try:
        jax.monitoring.register_event_duration_secs_listener(_listen)
        type.__setattr__(JitFunction, "__call__", timed)
        yield
    finally:
        type.__setattr__(JitFunction, "__call__", plain)
        clocks.take_out()
        jax.monitoring.unregister_event_duration_listener(_listen)
        _being_timed.release()


def _listen(event: str, duration_secs: float, **details: Any) -> None:
    """Adds JAX's compile times to the call that runs in this thread."""
    call = _thread.call
    if call is not None and event.startswith(_COMPILING):
        call.compiling_s += duration_secs
        is_own = details.get("fun_name") == call.dispatcher.order.function_name
        call.num_traces += event == _TRACE and is_own


class _Clocks:
    """Puts clocks into fast paths, to measure the time that the jitted functions take."""

    def __init__(self):
        self._lock = threading.Lock()
        self._namespaces: list[dict[str, Any]] = []
        self._is_over = False

    def put_into(self, dispatcher: Dispatcher) -> None:
        """Puts clocks into the fast paths of a function.

        If the context has already ended, because the call is in another thread, this method does
        nothing.
        """
        with self._lock:
            for compiled in () if self._is_over else dispatcher.compiled_functions():
                names = getattr(compiled.own_fast_path, "__globals__", None)
                if names is not None and not isinstance(names["jitted"], _TimedJit):
                    names["jitted"] = _TimedJit(names["jitted"])
                    self._namespaces.append(names)

    def take_out(self) -> None:
        with self._lock:
            self._is_over = True
            for names in self._namespaces:
                names["jitted"] = names["jitted"].jitted


class _TimedJit:
    """A jitted function that measures the time of each call."""

    __slots__ = ("jitted",)

    def __init__(self, jitted: Callable[..., Any]):
        self.jitted = jitted

    def __call__(self, *arrays: Any) -> Any:
        start_s = time.perf_counter()
        result = self.jitted(*arrays)
        call = _thread.call
        if call is not None:
            call.jax_s = time.perf_counter() - start_s
            call.result = result
        return result
