"""The time of one call in parts: ours, JAX's dispatch, and the rest until the result is ready."""

import dataclasses
import statistics

from .._timing import Column, ratios


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
