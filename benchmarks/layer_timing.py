"""Interleaved timing of calls that can be made only once: first calls and compilations.

`benchmarks.timing.measure` repeats calls, so it cannot time first calls. Here each round prepares
every column again, outside of the clock, and times one call. Rounds are interleaved and ratios are
computed in each round, as in `benchmarks.timing`.
"""

import time
from collections.abc import Callable, Mapping

import jax

from benchmarks.timing import Call, Measurement, Samples, frozen_heap, round_orders, summarise

Prepare = Callable[[], Call]


def measure_first_calls(
    preparations: Mapping[str, Prepare], *, baseline: str, rounds: int, seed: int = 0
) -> Measurement:
    """Measures the first calls of new functions interleaved.

    **Arguments:**

    - `preparations`: functions that return a new call each time, by name. An untimed first round
      absorbs JAX's setup costs.
    - `baseline`: the column that is the denominator of ratios.
    - `rounds`: the number of preparations and calls of each column.
    - `seed`: the seed of the order of the columns.

    **Returns:** a `Measurement` with a `Column` for each name, in the order of `preparations`.
    """
    for prepare in preparations.values():
        timed_us(prepare())
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in preparations}
    with frozen_heap():
        for order in round_orders(tuple(preparations), rounds, seed):
            for name in order:
                times[name].append(timed_us(preparations[name]()))
    samples = {}
    for name, pairs in times.items():
        dispatch_us, completion_us = zip(*pairs, strict=True)
        samples[name] = Samples(dispatch_us, completion_us, calls=1)
    return summarise(samples, baseline)


def timed_us(call: Call) -> tuple[float, float]:
    """The microseconds until a call returns, and until its result is ready."""
    start_s = time.perf_counter()
    result = call()
    returned_s = time.perf_counter()
    jax.block_until_ready(result)
    ready_s = time.perf_counter()
    return 1e6 * (returned_s - start_s), 1e6 * (ready_s - start_s)
