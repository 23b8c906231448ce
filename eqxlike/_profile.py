"""Profiling: times of compiled functions, samples of the Python stack, and XLA's trace."""

import array
import collections
import contextlib
import dataclasses
import functools
import importlib.util
import os
import pathlib
import statistics
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import jax
import jax.monitoring

from ._check_numbers import positive_number
from ._names import import_extra
from ._tables import align, rich_table
from .extend import CallTimes, timing_calls

Session = Any
"""A `pyinstrument.session.Session`: a list of samples.

Each sample is a stack of frames, outermost first, and the seconds since the previous sample.
"""


@contextlib.contextmanager
def profile(
    *,
    wait: bool = True,
    sample: bool = False,
    interval_s: float = 1e-3,
    trace: str | os.PathLike[str] | None = None,
) -> Iterator["Profile"]:
    """Context manager that measures where a block of code spends its time.

    It times each call of a function wrapped by `filter_jit`. The time has three parts: eqxlike's
    Python code, JAX's dispatch of the compiled program, and the wait until the result is ready.
    Calls that trace and compile are counted separately. Outside the context, calls are not slowed
    down. Functions wrapped by `jax.jit` are not timed; use `sample=True` to see them.

    **Arguments:**

    - `wait`: if `True`, each call waits for its result. Waiting slows down a loop that otherwise
      runs ahead of the device. Without waiting, the time until a result is ready is unknown.
    - `sample`: if `True`, pyinstrument samples the Python stack. Sampling slows down all Python
      calls, so measure times without it.
    - `interval_s`: minimum time between two samples, in seconds.
    - `trace`: folder for XLA's trace, written by `jax.profiler.trace`. Open its
      `perfetto_trace.json.gz` in https://ui.perfetto.dev.

    **Returns:** a context manager that yields a `Profile`. The results are in it after the block.

    **Raises:**

    - `ImportError` if `sample` is set and pyinstrument is not installed.
    - `RuntimeError` if another profile is active.
    - `TypeError` or `ValueError` if `interval_s` is not a positive number, or if `trace` is not a
      path.

    !!! example

        >>> import eqxlike as eqx, jax.numpy as jnp
        >>> @eqx.filter_jit
        ... def step(x):
        ...     return 2 * x
        >>> x = jnp.ones(3)
        >>> with eqx.profile() as p:
        ...     for _ in range(10):
        ...         x = step(x)
        >>> found = p.functions[0]
        >>> found.num_calls, found.num_traces, found.split.total_us > 0
        (10, 1, True)
    """
    interval_s = positive_number(interval_s, "interval_s")
    trace = None if trace is None else os.fspath(trace)
    found = Profile()
    records: dict[Any, _Record] = {}
    lock = threading.Lock()

    def report(call: CallTimes) -> None:
        with lock:
            if call.dispatcher not in records:
                records[call.dispatcher] = _Record(call.dispatcher.full_name)
            records[call.dispatcher].add(call)

    profiler = new_profiler(interval_s) if sample else None
    with contextlib.ExitStack() as stack:
        if trace is not None:
            stack.enter_context(jax.profiler.trace(trace, create_perfetto_trace=True))
        stack.enter_context(timing_calls(report, wait))
        start_s = time.perf_counter()
        if profiler is not None:
            profiler.start()
        try:
            yield found
        finally:
            if profiler is not None:
                found.session = profiler.stop()
            found.elapsed_s = time.perf_counter() - start_s
            times = (each.times() for each in list(records.values()))
            found.functions = tuple(sorted(times, key=lambda each: -each.total_s))


@dataclasses.dataclass(repr=False)
class Profile:
    """The results of `profile`, available after its block. `str` formats them as a table.

    - `functions`: the times of each called function that `filter_jit` wraps. The function with the
      longest time comes first.
    - `elapsed_s`: duration of the block in seconds.
    - `session`: the samples, as a pyinstrument session; `None` if `sample` was not set.
    """

    functions: "tuple[FunctionTimes, ...]" = ()
    elapsed_s: float = 0.0
    session: Session = None

    def __str__(self) -> str:
        return f"{align(_HEADER, self._rows)}\n{self.totals}"

    __repr__ = __str__

    def __rich__(self) -> Any:
        return rich_table(_HEADER, self._rows, self.totals)

    @property
    def _rows(self) -> list[tuple[str, ...]]:
        return [each.cells for each in self.functions]

    @property
    def totals(self) -> str:
        """The last line of the table: total time, and the percentage spent in the timed calls."""
        in_calls_s = sum(each.total_s for each in self.functions)
        share = in_calls_s / self.elapsed_s if self.elapsed_s else 0.0
        return f"{self.elapsed_s:.3f} s, {share:.0%} of them in these calls"

    @property
    def tree(self) -> str:
        """The tree of Python calls as text, with all frames.

        **Raises:** `ValueError` if the profile has no samples.
        """
        from pyinstrument.renderers import ConsoleRenderer

        # `show_all`, because pyinstrument hides most frames of this package by default.
        return ConsoleRenderer(show_all=True, unicode=True).render(self._sampled())

    @property
    def page(self) -> str:
        """The tree of Python calls as an HTML page, with a timeline.

        **Raises:** `ValueError` if the profile has no samples.
        """
        from pyinstrument.renderers import HTMLRenderer

        return HTMLRenderer().render(self._sampled())

    def write(self, path: str | os.PathLike[str]) -> list[pathlib.Path]:
        """Writes the tree, the page and the pyinstrument session to three files.

        **Arguments:**

        - `path`: path of the files without suffix; `.txt`, `.html` and `.pyisession` are added.

        **Returns:** the paths of the files written.

        **Raises:** `ValueError` if the profile has no samples.
        """
        session, path = self._sampled(), pathlib.Path(path)
        text, page, raw = (
            path.with_name(path.name + end) for end in (".txt", ".html", ".pyisession")
        )
        text.write_text(self.tree, encoding="utf-8")
        page.write_text(self.page, encoding="utf-8")
        session.save(raw)
        return [text, page, raw]

    def _sampled(self) -> Session:
        if self.session is None:
            raise ValueError(
                "This profile has no samples: use `with eqxlike.profile(sample=True) as p:`, and "
                "read the samples after the end of the block."
            )
        return self.session


# --- Stages of compilation ---


_STAGES = (
    "/jax/core/compile/jaxpr_trace_duration",
    "/jax/core/compile/jaxpr_to_mlir_module_duration",
    "/jax/core/compile/backend_compile_duration",
)


class Stages:
    """The times that JAX takes to trace, lower and compile programs inside `listening`."""

    def __init__(self):
        # For each stage, pairs of start and end times in seconds.
        self._times: dict[str, list[tuple[float, float]]] = {event: [] for event in _STAGES}

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        jax.monitoring.register_event_duration_secs_listener(self._listen)
        try:
            yield
        finally:
            jax.monitoring.unregister_event_duration_listener(self._listen)

    def _listen(self, event: str, duration_secs: float, **_: Any) -> None:
        if event in self._times:
            end_s = time.perf_counter()
            start_s, times = end_s - duration_secs, self._times[event]
            # Drop events that happened during this event, such as traces of inner functions.
            while times and times[-1][0] >= start_s:
                times.pop()
            times.append((start_s, end_s))

    def __str__(self) -> str:
        traced, lowered, compiled = (
            sum(end_s - start_s for start_s, end_s in times) for times in self._times.values()
        )
        return (
            f"traced {traced:.3f} s, lowered {lowered:.3f} s, compiled {compiled:.3f} s, "
            f"{len(self._times[_STAGES[-1]])} programs"
        )


# --- Times of each function ---


@dataclasses.dataclass(frozen=True)
class Split:
    """The time of one call in three parts, in microseconds.

    - `ours_us`: time that `filter_jit` adds until the call returns.
    - `jax_us`: time in the function that `jax.jit` made. It contains the C++ dispatch. It also
      contains the execution if the runtime runs a cheap program on the calling thread.
    - `rest_us`: time from the return of the call until the result is ready. If `jax_us` contains
      the execution, `rest_us` is near 0 and may be negative.
    """

    ours_us: float
    jax_us: float
    rest_us: float

    @property
    def total_us(self) -> float:
        """The time until the result is ready."""
        return self.ours_us + self.jax_us + self.rest_us


_HEADER = (
    *("Function", "Calls", "Traces", "Compiling, s"),
    *("Dispatch, us", "Ours, us", "JAX, us", "Ready, us", "All, s"),
)


@dataclasses.dataclass(frozen=True)
class FunctionTimes:
    """The calls of one function wrapped by `filter_jit`.

    The times of one call are medians in microseconds over the calls that took the fast path. If no
    call took the fast path, the medians are taken over the calls that did not compile. If all calls
    compiled, the times are `None`.

    - `name`: name of the function.
    - `num_calls`, `num_traces`: number of calls, and of traces.
    - `compiling_s`: seconds that JAX took to trace, lower and compile.
    - `dispatch_us`: time until a call returned.
    - `completion_us`: time until the result was ready; `None` if `wait` was `False`.
    - `split`: the time of a call in three parts; `None` if no call took the fast path.
    - `total_s`: seconds of all calls, including the waits for their results.
    """

    name: str
    num_calls: int
    num_traces: int
    compiling_s: float
    dispatch_us: float | None
    completion_us: float | None
    split: Split | None
    total_s: float

    @property
    def cells(self) -> tuple[str, ...]:
        """The row of this function in the table."""
        ours_us = None if self.split is None else self.split.ours_us
        jax_us = None if self.split is None else self.split.jax_us
        times_us = (self.dispatch_us, ours_us, jax_us, self.completion_us)
        return (
            *(self.name, str(self.num_calls), str(self.num_traces), f"{self.compiling_s:.3f}"),
            *("-" if each is None else f"{each:.1f}" for each in times_us),
            f"{self.total_s:.3f}",
        )


class _Record:
    """Collects the calls of one function."""

    def __init__(self, name: str):
        self._name = name
        self._num_calls = self._num_traces = 0
        self._compiling_s = self._total_s = 0.0
        # Three durations in seconds for each call: until the call returned, in JAX, and until the
        # result was ready. For some calls, such as the first call of a profile, the time in JAX is
        # unknown. These calls are kept separately. Packed arrays save memory, since there may be
        # millions of calls.
        self._without_jax, self._with_jax = ([array.array("d") for _ in range(3)] for _ in range(2))

    def add(self, call: CallTimes) -> None:
        self._num_calls += 1
        self._num_traces += call.num_traces
        self._compiling_s += call.compiling_s
        self._total_s += call.dispatch_s if call.ready_s is None else call.ready_s
        if not call.compiling_s:
            kept = self._without_jax if call.jax_s is None else self._with_jax
            times_s = call.dispatch_s, call.jax_s, call.ready_s
            for each, time_s in zip(kept, times_s, strict=True):
                if time_s is not None:
                    each.append(time_s)

    def times(self) -> FunctionTimes:
        # All medians are taken over the same calls, so that the parts add up to the total.
        kept = self._with_jax if self._with_jax[0] else self._without_jax
        dispatch_us, jax_us, completion_us = (
            1e6 * statistics.median(times_s) if times_s else None for times_s in kept
        )
        split = None
        if dispatch_us is not None and jax_us is not None:
            rest_us = 0.0 if completion_us is None else completion_us - dispatch_us
            split = Split(dispatch_us - jax_us, jax_us, rest_us)
        return FunctionTimes(
            self._name,
            self._num_calls,
            self._num_traces,
            self._compiling_s,
            dispatch_us,
            completion_us,
            split,
            self._total_s,
        )


# --- Sampling ---


def new_profiler(interval_s: float) -> Any:
    """Creates a `pyinstrument.Profiler` that takes a sample every `interval_s` seconds.

    **Raises:** `ImportError` if pyinstrument is not installed.
    """
    pyinstrument = import_extra(
        "pyinstrument",
        "Sampling needs pyinstrument: pip install 'eqxlike[profile]', or pip install pyinstrument",
    )
    return pyinstrument.Profiler(interval=interval_s, async_mode="disabled")


def sample(
    call: Callable[[], Any], calls: int, interval_s: float = 1e-4, warm_up: int = 5
) -> Profile:
    """Samples the Python stack during warm calls, waiting for each result.

    **Arguments:**

    - `call`: a function without arguments that returns a pytree of arrays.
    - `calls`: number of calls.
    - `interval_s`: minimum time between two samples, in seconds.
    - `warm_up`: number of calls before the first sample.

    **Raises:** `ImportError` if pyinstrument is not installed.
    """
    profiler = new_profiler(interval_s)
    for _ in range(warm_up):
        jax.block_until_ready(call())
    profiler.start()
    for _ in range(calls):
        jax.block_until_ready(call())
    return Profile(session=profiler.stop())


OURS = "eqxlike"
JAX = "jax"
OTHER = "other"

_GENERATED = "<eqxlike"
"""Start of the file name of functions that eqxlike generates at run time."""

_NOT_PYTHON = ("<built-in>", "<thread>")
"""pyinstrument's file names for functions in C, and for the thread at the bottom of a stack."""

_PACKAGES = {
    name: [pathlib.Path(folder) for folder in spec.submodule_search_locations or ()]
    for name in (OURS, JAX, "jaxlib")
    if (spec := importlib.util.find_spec(name)) is not None
}


@functools.cache
def _owner(file: str) -> str:
    """The owner of a source file: `OURS`, `JAX` or `OTHER`."""
    if file.startswith(_GENERATED):
        return OURS
    for name, folders in _PACKAGES.items():
        if any(pathlib.Path(file).is_relative_to(folder) for folder in folders):
            # This module calls the profiled function and waits; its frames do not count as ours.
            return OTHER if file == __file__ else OURS if name == OURS else JAX
    return OTHER


@dataclasses.dataclass(frozen=True, order=True)
class Frame:
    """A function in a sampled stack."""

    file: str
    line: int
    function: str

    @property
    def owner(self) -> str:
        """The owner of the function: `OURS`, `JAX` or `OTHER`."""
        return _owner(self.file)


def self_times(session: Session) -> dict[Frame, float]:
    """Seconds spent in each function, without the functions of eqxlike and JAX that it calls.

    The time of a function of eqxlike or JAX includes the C code that it calls, such as compiled
    programs. It also includes the Python code of other libraries that it calls.
    """
    times: dict[Frame, float] = collections.defaultdict(float)
    for stack, seconds in session.frame_records:
        frame = innermost(stack)
        if frame is not None:
            times[frame] += seconds
    return dict(times)


def innermost(stack: Iterable[str]) -> Frame | None:
    """The innermost frame of eqxlike or JAX; without such a frame, the innermost Python frame.

    **Arguments:**

    - `stack`: frames in pyinstrument's format, outermost first.
    """
    found = None
    for text in stack:
        # A frame is the function, file and line, separated by \x00. Other attributes follow \x01.
        function, file, line = text.partition("\x01")[0].split("\x00")
        is_owned = found is not None and found.owner != OTHER
        # A frame of this module calls the profiled function. The frames outside of this frame only
        # started the profiler, so they are dropped.
        if file == __file__ or (
            file not in _NOT_PYTHON and not (is_owned and _owner(file) == OTHER)
        ):
            found = Frame(file, int(line), function)
    return found


def shares(times: Mapping[Frame, float]) -> dict[str, float]:
    """For each owner, the fraction of the time that is spent in its functions."""
    total = sum(times.values()) or 1.0
    parts: dict[str, float] = {OURS: 0.0, JAX: 0.0, OTHER: 0.0}
    for frame, seconds in times.items():
        parts[frame.owner] += seconds / total
    return parts


def hot_frames(times: Mapping[Frame, float], count: int = 6) -> list[str]:
    """Describes the `count` functions of eqxlike and JAX that take the most time, one per line."""
    total = sum(times.values()) or 1.0
    found = [item for item in times.items() if item[0].owner != OTHER]
    return [
        f"  {seconds / total:4.0%}  {frame.function}  {_short(frame.file)}:{frame.line}"
        for frame, seconds in sorted(found, key=lambda item: -item[1])[:count]
    ]


def _short(file: str) -> str:
    """The end of a path, which starts with the name of the package."""
    parts = pathlib.Path(file).parts
    for package in _PACKAGES:
        if package in parts:
            return "/".join(parts[len(parts) - 1 - parts[::-1].index(package) :])
    return file
