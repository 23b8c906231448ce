"""Functions timed side by side, some of which may be slow, or fail."""

import dataclasses
import math
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

from ..._timing import (
    UNTIMED,
    calls_for,
    completion_us,
    dispatch_us,
    frozen_heap,
    round_orders,
    warmed_up,
)

Call = Callable[[], Any]
Wait = Callable[[Any], Any]

_TARGET_S = 0.00125
"""The approximate seconds of each measurement: as in `measure`, less than a slice of time."""

_ESTIMATES, _MOST_S = 10, 0.1
"""A call is timed so often, or so long, to find out how many of them fill a measurement."""


@dataclasses.dataclass
class Times:
    """What the clock said of one function.

    - `dispatch_us`, `completion_us`: microseconds a call, by the number of the round.
    - `failure`: what it raised meanwhile, after which it was timed no more.
    """

    dispatch_us: dict[int, float] = dataclasses.field(default_factory=dict)
    completion_us: dict[int, float] = dataclasses.field(default_factory=dict)
    failure: Exception | None = None

    def ratio_to(self, other: "Times") -> float:
        """The median of the ratios of completion, over the rounds that both have."""
        both = self.completion_us.keys() & other.completion_us.keys()
        return statistics.median(self.completion_us[n] / other.completion_us[n] for n in both)


@dataclasses.dataclass
class _Contestant:
    call: Call
    times: Times
    wait: Wait
    count: int
    spent_s: float = 0.0

    def take_turn(self, number: int) -> None:
        start_s = time.perf_counter()
        if self.count == 1:
            times = _times_of_one_call(self.call, self.wait)
        else:
            completion_us(self.call, self.wait, UNTIMED)
            timed = self.call, self.wait, self.count
            times = dispatch_us(*timed), completion_us(*timed)
        self.times.dispatch_us[number], self.times.completion_us[number] = times
        self.spent_s += time.perf_counter() - start_s


def time_beside(
    baseline: str,
    calls: Mapping[str, Call],
    into: Mapping[str, Times],
    *,
    rounds: int,
    budget_s: float,
) -> None:
    """Times functions in turn, as `eqxlike._timing.measure` does.

    It differs in what it does about a function that is so slow that it would keep all others
    waiting: that has fewer rounds; and about one that raises: that is left out from there on.

    **Arguments:**

    - `baseline`: the name of the function that takes part in each round. What it raises passes.
    - `calls`: functions of no arguments, by name, that return an array to wait for.
    - `into`: where to note the times, so that they are there after a `KeyboardInterrupt`.
    - `rounds`: the number of rounds.
    - `budget_s`: a function that has taken so many seconds sits out the rest.
    """
    contestants: dict[str, _Contestant] = {}
    for name, call in calls.items():
        try:
            contestants[name] = _contestant(call, into[name])
        except Exception as error:
            _note(error, into[name], name == baseline)
    with frozen_heap():
        for number, order in enumerate(round_orders(tuple(contestants), rounds, seed=0)):
            left = [
                name
                for name, each in contestants.items()
                if name != baseline and each.times.failure is None and each.spent_s < budget_s
            ]
            if not left:
                return
            for name in order:
                if name in (baseline, *left):
                    try:
                        contestants[name].take_turn(number)
                    except Exception as error:
                        _note(error, into[name], name == baseline)


def _note(error: Exception, times: Times, is_baseline: bool) -> None:
    if is_baseline:
        raise error
    # The frames of the traceback hold arrays.
    times.failure = error.with_traceback(None)


def _contestant(call: Call, times: Times) -> _Contestant:
    wait = warmed_up(call, 1)
    call_s, spent_s = math.inf, 0.0
    # One slow call may have been disturbed. Taken for the truth, it would leave the function with a
    # single call a round, on cold caches, for all rounds.
    for _ in range(_ESTIMATES):
        this_s = 1e-6 * completion_us(call, wait, 1)
        call_s, spent_s = min(call_s, this_s), spent_s + this_s
        if spent_s > _MOST_S:
            break
    return _Contestant(call, times, wait, calls_for(_TARGET_S, call_s))


def _times_of_one_call(call: Call, wait: Wait) -> tuple[float, float]:
    """Dispatch and completion of the same call, in microseconds."""
    start_s = time.perf_counter()
    result = call()
    returned_s = time.perf_counter()
    wait(result)
    return 1e6 * (returned_s - start_s), 1e6 * (time.perf_counter() - start_s)
