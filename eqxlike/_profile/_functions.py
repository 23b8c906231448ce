"""The calls of each function of a run, and what they took."""

import array
import dataclasses
import statistics
from typing import Any

from .._timing import Column, ratios
from .._transforms import CallTimes

# The time of one call in parts: ours, JAX's dispatch, and the rest until the result is ready.


@dataclasses.dataclass(frozen=True)
class Split:
    """The time of one call, in microseconds; the three parts add up to its completion.

    - `ours_us`: the time that `filter_jit` needs beyond JAX's until the call returns.
    - `jax_us`: the time that the function of `jax.jit` needs until it returns: C++ dispatch, and
      execution where the runtime runs a cheap program on the calling thread.
    - `rest_us`: the time from the return of the call until the result is ready. It is near 0, of
      either sign, where execution was part of dispatch.
    """

    ours_us: float
    jax_us: float
    rest_us: float

    @property
    def total_us(self) -> float:
        """The time until the result is ready."""
        return self.ours_us + self.jax_us + self.rest_us


def split(ours: Column) -> Split:
    """Splits the time of a call.

    **Arguments:**

    - `ours`: the column of `filter_jit`, measured with flat `jax.jit` as its baseline.
    """
    jax_us = ours.dispatch_us / ours.dispatch_ratio.median
    waiting = statistics.median(ratios(ours.samples.completion_us, ours.samples.dispatch_us)) - 1
    return Split(ours.dispatch_us - jax_us, jax_us, ours.dispatch_us * waiting)


HEADER = (
    "Function",
    "Calls",
    "Traces",
    "Compiling, s",
    "Dispatch, us",
    "Ours, us",
    "JAX, us",
    "Ready, us",
    "All, s",
)


@dataclasses.dataclass(frozen=True)
class FunctionTimes:
    """The calls of one function that `filter_jit` wrapped.

    Times of one call are medians in microseconds, over the calls that took the fast path, or over
    those that traced and compiled nothing if none did; `None` if there was no such call.

    - `name`: the name of the function.
    - `num_calls`, `num_traces`: how often it was called, and how often traced.
    - `compiling_s`: the seconds that JAX took to trace, lower and compile.
    - `dispatch_us`: until a call returned.
    - `completion_us`: until its result was ready; `None` too if nobody waited for it.
    - `split`: those two in parts; `None` too if no call took the fast path.
    - `total_s`: the seconds of all calls, with the waits for their results.
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
        """The row of the table, in the order of `HEADER`."""
        ours_us = None if self.split is None else self.split.ours_us
        jax_us = None if self.split is None else self.split.jax_us
        times_us = (self.dispatch_us, ours_us, jax_us, self.completion_us)
        return (
            self.name,
            str(self.num_calls),
            str(self.num_traces),
            f"{self.compiling_s:.3f}",
            *("-" if each is None else f"{each:.1f}" for each in times_us),
            f"{self.total_s:.3f}",
        )


class Record:
    """The calls of one function as they come."""

    def __init__(self, name: str):
        self._name = name
        self._num_calls = self._num_traces = 0
        self._compiling_s = self._total_s = 0.0
        # Of calls into which nobody looked, as the first of a profile, and of the others.
        self._outside, self._inside = _Times(), _Times()

    def add(self, call: CallTimes) -> None:
        self._num_calls += 1
        self._num_traces += call.num_traces
        self._compiling_s += call.compiling_s
        self._total_s += call.dispatch_s if call.ready_s is None else call.ready_s
        if not call.compiling_s:
            (self._outside if call.jax_s is None else self._inside).add(call)

    def times(self) -> FunctionTimes:
        # All times are of the same calls, so that the parts add up.
        times = self._inside if self._inside.dispatch_s else self._outside
        dispatch_us, jax_us = _median_us(times.dispatch_s), _median_us(times.jax_s)
        completion_us, split = _median_us(times.ready_s), None
        if dispatch_us is not None and jax_us is not None:
            rest_us = 0.0 if completion_us is None else completion_us - dispatch_us
            split = Split(dispatch_us - jax_us, jax_us, rest_us)
        return FunctionTimes(
            name=self._name,
            num_calls=self._num_calls,
            num_traces=self._num_traces,
            compiling_s=self._compiling_s,
            dispatch_us=dispatch_us,
            completion_us=completion_us,
            split=split,
            total_s=self._total_s,
        )


class _Times:
    """The times of calls; packed, since a run may have millions of them."""

    def __init__(self):
        self.dispatch_s, self.jax_s, self.ready_s = (array.array("d") for _ in range(3))

    def add(self, call: CallTimes) -> None:
        self.dispatch_s.append(call.dispatch_s)
        if call.jax_s is not None:
            self.jax_s.append(call.jax_s)
        if call.ready_s is not None:
            self.ready_s.append(call.ready_s)


def _median_us(times_s: Any) -> float | None:
    return 1e6 * statistics.median(times_s) if times_s else None
