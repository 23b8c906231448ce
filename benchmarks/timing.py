"""Interleaved timing of callables in one process: the method behind all published numbers.

Absolute times on a shared machine vary, but ratios within one run are reliable. All columns run
interleaved, in an order that changes from round to round. Each round gives one ratio for each
column, and the reported number is the median of these ratios. Many short rounds are better than few
long rounds, because a measurement shorter than the scheduler's time slice is rarely interrupted.

Two times are measured for each call:

- *Dispatch*: the time until a call returns and the Python thread is free. Calls are made in
  bursts; the clock stops when the last call of a burst returns, before waiting for the results. A
  burst is short (`BURST`) because the runtime allows only about thirty computations in flight on a
  CPU device. In a longer burst, calls would wait for the device, and dispatch would include its
  speed. The runtime runs cheap programs on the calling thread. Their execution is then part of
  dispatch, in all columns.
- *Completion*: the time until the result is ready, as in a loop that reads every result.

A training step has state. The callable stores the state in a closure and returns one array of the
step, such as the loss. Waiting for this array waits for the whole step, because all outputs of an
executable become ready together. Waiting for the state would also time its flattening, which a
training loop does not need. The next step needs the state, so completion is the latency of a step:
dispatch, then execution. A loop that reads no loss overlaps dispatch and execution, and takes the
longer of the two times.

First calls, compilations and fresh processes cannot be repeated. Each round prepares them again,
outside the clock, and times one of each.
"""

import contextlib
import dataclasses
import datetime
import functools
import gc
import importlib.metadata
import itertools
import json
import math
import os
import pathlib
import platform
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import jax
import numpy as np

Call = Callable[[], Any]
Prepare = Callable[[], Call]
Result = TypeVar("Result")

BURST = 16
"""The number of calls in a burst of a dispatch measurement. XLA's CPU client allows about 30
computations in flight, and the next call waits. For a program of 20 ms, a call took 5 us up to the
31st call, and 20 ms after it.
"""

TARGET_S = 0.00125
"""The approximate seconds of each measurement: less than the scheduler's time slice."""

UNTIMED = 3
"""The number of untimed calls at the start of a column's turn. They warm up the caches, which the
previous column has filled.
"""


@dataclasses.dataclass(frozen=True)
class Quartiles:
    """The three quartiles of some numbers."""

    lower: float
    median: float
    upper: float


@dataclasses.dataclass(frozen=True)
class Samples:
    """The times of a column in `R` rounds, in microseconds for a call.

    - `dispatch_us`: `R` times until a call returns.
    - `completion_us`: `R` times until the result of a call is ready.
    - `calls`: the number of calls whose mean is each time.
    """

    dispatch_us: tuple[float, ...]
    completion_us: tuple[float, ...]
    calls: int


@dataclasses.dataclass(frozen=True)
class Column:
    """A callable compared with the baseline.

    - `dispatch_us`: median over the rounds of the time until a call returns.
    - `completion_us`: median over the rounds of the time until its result is ready.
    - `dispatch_ratio`: quartiles of the per-round ratios of `dispatch_us` to the baseline's.
    - `completion_ratio`: quartiles of the per-round ratios of `completion_us` to the baseline's.
    - `samples`: the times of all rounds.
    """

    name: str
    dispatch_us: float
    completion_us: float
    dispatch_ratio: Quartiles
    completion_ratio: Quartiles
    samples: Samples


@dataclasses.dataclass(frozen=True)
class Measurement:
    """Columns by name, and the name of the column that is the denominator of ratios."""

    baseline: str
    columns: Mapping[str, Column]


def measure(
    calls: Mapping[str, Call],
    *,
    baseline: str,
    rounds: int = 200,
    target_s: float = TARGET_S,
    warm_up: int = 5,
) -> Measurement:
    """Measures callables interleaved.

    **Arguments:**

    - `calls`: functions without arguments, by name. They return an array or a pytree of arrays to
      wait for. A call must not donate the result of the previous call. A closure may store state.
    - `baseline`: the name of the column that is the denominator of ratios.
    - `rounds`: the number of measurements of each callable. Do not quote from fewer than 15.
    - `target_s`: the approximate seconds of each of the two measurements of a callable in a round.
    - `warm_up`: the number of untimed calls at the start, which include compilation.

    **Returns:** a `Measurement` with a `Column` for each callable, in the order of `calls`.

    **Raises:** `ValueError` if `baseline` is not in `calls`, or `rounds` or `warm_up` is below 1.
    """
    if baseline not in calls:
        raise ValueError(f"baseline {baseline!r} is not among the callables: {', '.join(calls)}")
    if rounds < 1 or warm_up < 1:
        raise ValueError(f"rounds and warm_up must be 1 or more, got {rounds} and {warm_up}")
    timed = {name: Timed(call, warm_up, target_s) for name, call in calls.items()}
    with frozen_heap():
        taken = interleaved({name: each.take_turn for name, each in timed.items()}, rounds)
    samples = {
        name: Samples(*zip(*times, strict=True), calls=timed[name].count)
        for name, times in taken.items()
    }
    return summarise(samples, baseline)


class Timed:
    """A warmed-up call, and the number of calls that fill `target_s`."""

    def __init__(self, call: Call, warm_up: int, target_s: float = TARGET_S):
        self.call = call
        self.wait = warmed_up(call, warm_up)
        # The fastest of several calls, because a single call may be disturbed. If it were too slow,
        # all rounds would have only one call, on cold caches.
        call_s = fastest_s(call, self.wait, times=10, most_s=0.1)
        self.count = calls_for(target_s, call_s)

    def take_turn(self) -> tuple[float, float]:
        """Measures dispatch and completion in a round, in microseconds for a call."""
        completion_us(self.call, self.wait, UNTIMED)
        timed = self.call, self.wait, self.count
        return dispatch_us(*timed), completion_us(*timed)


def measure_first_calls(
    preparations: Mapping[str, Prepare], *, baseline: str, rounds: int
) -> Measurement:
    """Measures first calls of new functions, and compilations, side by side.

    **Arguments:**

    - `preparations`: functions that return a new call each time, by name. An untimed first round
      absorbs JAX's setup costs.
    - `baseline`: the column that is the denominator of ratios.
    - `rounds`: the number of preparations and calls of each column.

    **Returns:** a `Measurement` with a `Column` for each name, in the order of `preparations`.
    """

    def timed_us(prepare: Prepare) -> tuple[float, float]:
        call = prepare()
        start_s = time.perf_counter()
        result = call()
        returned_s = time.perf_counter()
        jax.block_until_ready(result)
        ready_s = time.perf_counter()
        return 1e6 * (returned_s - start_s), 1e6 * (ready_s - start_s)

    turns = {name: functools.partial(timed_us, each) for name, each in preparations.items()}
    for turn in turns.values():
        turn()
    with frozen_heap():
        taken = interleaved(turns, rounds)
    samples = {name: Samples(*zip(*us, strict=True), calls=1) for name, us in taken.items()}
    return summarise(samples, baseline)


def of_seconds(times_s: Mapping[str, Sequence[float]], baseline: str) -> Measurement:
    """The measurement of columns that each have one time a round, until the result is ready."""
    samples = {}
    for name, each_s in times_s.items():
        us = tuple(1e6 * each for each in each_s)
        samples[name] = Samples(us, us, calls=1)
    return summarise(samples, baseline)


def in_process(*command: str, **environment: str) -> Any:
    """The JSON in the last line that a fresh Python process prints.

    **Arguments:**

    - `command`: the arguments of Python.
    - `environment`: variables that are added to the environment.
    """
    process = subprocess.run(
        [sys.executable, *command],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        env=os.environ | environment,
    )
    return json.loads(process.stdout.splitlines()[-1])


def interleaved(turns: Mapping[str, Callable[[], Result]], rounds: int) -> dict[str, list[Result]]:
    """The results of functions that are called once a round, in the orders of `round_orders`."""
    results: dict[str, list[Result]] = {name: [] for name in turns}
    for order in round_orders(tuple(turns), rounds, seed=0):
        for name in order:
            results[name].append(turns[name]())
    return results


def summarise(samples: Mapping[str, Samples], baseline: str) -> Measurement:
    """The medians over rounds of each column, and of its ratios to `baseline` in each round."""
    base = samples[baseline]
    columns = {
        name: Column(
            name=name,
            dispatch_us=statistics.median(own.dispatch_us),
            completion_us=statistics.median(own.completion_us),
            dispatch_ratio=quartiles(ratios(own.dispatch_us, base.dispatch_us)),
            completion_ratio=quartiles(ratios(own.completion_us, base.completion_us)),
            samples=own,
        )
        for name, own in samples.items()
    }
    return Measurement(baseline, columns)


def ratios(numbers: Sequence[float], to: Sequence[float]) -> list[float]:
    """The ratio in each round. Constant load during a round cancels."""
    return [number / base for number, base in zip(numbers, to, strict=True)]


def quartiles(numbers: Sequence[float]) -> Quartiles:
    """The quartiles, interpolated within the data. For a single number, all three equal it."""
    if len(numbers) == 1:
        return Quartiles(numbers[0], numbers[0], numbers[0])
    return Quartiles(*statistics.quantiles(numbers, n=4, method="inclusive"))


def calls_for(target_s: float, call_s: float) -> int:
    """The number of calls of `call_s` seconds that fill `target_s`: at least 1, in whole bursts."""
    count = max(1, round(target_s / max(call_s, 1e-9)))
    return count if count < BURST else BURST * math.ceil(count / BURST)


def round_orders(names: Sequence[str], rounds: int, seed: int) -> Iterator[tuple[str, ...]]:
    """The order of the columns in each round.

    Rounds form blocks of `len(names)`. A block shuffles the columns and uses all rotations of this
    order, so that each column is once in each position. The neighbours of a column change between
    blocks, so that it does not always follow the same column, whose caches would affect it.
    """
    generator = random.Random(seed)
    order: list[str] = []
    for number in range(rounds):
        turn = number % len(names)
        if turn == 0:
            order = generator.sample(list(names), len(names))
        yield (*order[turn:], *order[:turn])


def warmed_up(call: Call, times: int) -> Callable[[Any], Any]:
    """Calls and waits `times` times. Returns the cheapest function that waits for the result."""
    results = [jax.block_until_ready(call()) for _ in range(times)]
    # A call of Identity takes 4 us. Waiting with the method of an array takes 0.4 us, and with
    # `jax.block_until_ready`, which accepts any pytree, 0.8 us.
    if isinstance(results[-1], jax.Array):
        return type(results[-1]).block_until_ready
    return jax.block_until_ready


def dispatch_us(call: Call, wait: Callable[[Any], Any], count: int) -> float:
    """The microseconds until a call returns, the mean of `count` calls in bursts, without waits.

    A result is kept until the same position in the next burst, so that waiting covers the whole
    burst. Deleting results is timed, as in a loop that rebinds a name.
    """
    results: list[Any] = [None] * min(BURST, count)
    bursts = math.ceil(count / len(results))
    elapsed_s = 0.0
    for _ in range(bursts):
        start_s = time.perf_counter()
        for place in range(len(results)):
            results[place] = call()
        elapsed_s += time.perf_counter() - start_s
        for result in results:
            wait(result)
    return 1e6 * elapsed_s / (bursts * len(results))


def completion_us(call: Call, wait: Callable[[Any], Any], count: int) -> float:
    """The microseconds until a result is ready, the mean of `count` calls, each with a wait."""
    start_s = time.perf_counter()
    for _ in itertools.repeat(None, count):
        wait(call())
    return 1e6 * (time.perf_counter() - start_s) / count


def fastest_s(call: Call, wait: Callable[[Any], Any], times: int, most_s: float) -> float:
    """The seconds until the result is ready, for the fastest of at most `times` calls.

    Stops early after `most_s` seconds.
    """
    fastest_s, spent_s = math.inf, 0.0
    for _ in range(times):
        call_s = 1e-6 * completion_us(call, wait, 1)
        fastest_s, spent_s = min(fastest_s, call_s), spent_s + call_s
        if spent_s > most_s:
            break
    return fastest_s


@contextlib.contextmanager
def frozen_heap() -> Iterator[None]:
    """Context manager that excludes all existing objects from garbage collection.

    Garbage collection stays enabled. A column pays for its own garbage, but not for the heap of
    imports and other columns. Does nothing if the caller has frozen the heap, because `gc.unfreeze`
    would unfreeze all of it.
    """
    gc.collect()
    # At its start, Python has frozen some hundreds of objects.
    if gc.get_freeze_count() > 1000:
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def machine_info() -> dict[str, Any]:
    """The versions and the machine of a measurement, as plain data for JSON."""
    device = jax.devices()[0]
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "eqxlike": installed_version("eqxlike"),
        "jax": jax.__version__,
        "jaxlib": installed_version("jaxlib"),
        "numpy": np.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "backend": device.platform,
        "device": device.device_kind,
        "devices": jax.device_count(),
    }


def installed_version(distribution: str) -> str | None:
    """The version of an installed distribution, or None."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _cpu_model() -> str:
    """The name of the processor, if the system reports it."""
    with contextlib.suppress(OSError):
        for line in pathlib.Path("/proc/cpuinfo").read_text().splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name":
                return value.strip()
    return platform.processor() or platform.machine()
