"""Functions timed side by side, some of which may be slow, or fail."""

import contextlib
import dataclasses
import functools
import math
import re
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Jaxpr, jaxprs_in_params

from .._programs import equations_in
from .._timing import Timed, fastest_s, frozen_heap, round_orders
from .._transforms import filter_jit, filter_make_jaxpr

Call = Callable[[], Any]


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


class _Slow(Timed):
    """A call that may be slow: one that fills a measurement by itself is made once a round."""

    def take_turn(self) -> tuple[float, float]:
        if self.count > 1:
            return super().take_turn()
        start_s = time.perf_counter()
        result = self.call()
        returned_s = time.perf_counter()
        self.wait(result)
        return 1e6 * (returned_s - start_s), 1e6 * (time.perf_counter() - start_s)


def time_interleaved(
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
    - `budget_s`: a function that has taken this many seconds sits out the rest.
    """

    @contextlib.contextmanager
    def attempt(name: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            if name == baseline:
                raise
            # The frames of the traceback hold arrays.
            into[name].failure = error.with_traceback(None)

    timed: dict[str, Timed] = {}
    for name, call in calls.items():
        with attempt(name):
            timed[name] = _Slow(call, 1)
    spent_s = dict.fromkeys(timed, 0.0)
    with frozen_heap():
        for number, order in enumerate(round_orders(tuple(timed), rounds, seed=0)):
            left = {
                name
                for name in timed
                if name != baseline and into[name].failure is None and spent_s[name] < budget_s
            }
            if not left:
                return
            for name in order:
                if name != baseline and name not in left:
                    continue
                start_s, times = time.perf_counter(), into[name]
                with attempt(name):
                    times.dispatch_us[number], times.completion_us[number] = timed[name].take_turn()
                spent_s[name] += time.perf_counter() - start_s


# --- Functions compiled again, with what the clock and XLA say of them ---


_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?\S+ = ", re.MULTILINE)


@dataclasses.dataclass(frozen=True)
class Program:
    """A compiled function.

    - `run`: calls it with the arguments that it was compiled for, or with others of their form.
    - `work`: how much it computes, to be compared with that of others.
    - `has_loop`: whether it has a loop.
    - `first_call_ms`, `traced_operations`, `compiled_operations`, `peak_bytes`: see
      `ComparisonRow`.
    """

    run: Callable[..., Any]
    work: int
    has_loop: bool
    first_call_ms: float
    traced_operations: int
    compiled_operations: int | None
    peak_bytes: int | None


def freshly_compiled(function: Callable[..., Any], args: tuple[Any, ...]) -> Program:
    """`function`, compiled by `filter_jit` for `args`, though it may have been before."""
    # To `filter_jit` each lambda is another function.
    again: Any = functools.partial(lambda function, /, *args: function(*args), function)
    jitted = filter_jit(again)
    start_s = time.perf_counter()
    ahead = jitted.lower(*args).compile()
    first_call_ms = 1e3 * (time.perf_counter() - start_s)
    # JAX has kept its trace: `function` itself would be traced again.
    (call,) = filter_make_jaxpr(jitted)(*args)[0].jaxpr.eqns
    (jaxpr,) = jaxprs_in_params(call.params)
    equations = list(equations_in(jaxpr))
    text, memory = ahead.as_text(), ahead.memory_analysis()
    return Program(
        run=lambda *others: jitted(*(others or args)),
        work=work(jaxpr),
        has_loop=any(each.primitive.name in ("scan", "while") for each in equations),
        first_call_ms=first_call_ms,
        traced_operations=len(equations),
        compiled_operations=None if text is None else len(_INSTRUCTION.findall(text)),
        peak_bytes=None if memory is None else memory.temp_size_in_bytes,
    )


# --- Programs that would take longer than anybody waits for, known before they run ---


_PATIENCE = 30
"""A call may be predicted to take this many times the budget. Nobody can interrupt one."""

_CALLS = 5


@dataclasses.dataclass(frozen=True)
class Pace:
    """How fast a function computes, by which the time of its derivatives is predicted.

    - `call_s`: the seconds that it takes.
    - `work`: what it computes meanwhile.
    - `budget_s`: see `compare`.
    """

    call_s: float
    work: int
    budget_s: float

    def complaint(self, program: Program) -> str | None:
        """What to say of a program that would take too long; `None` if it would not."""
        times = program.work / max(self.work, 1)
        if times * self.call_s <= _PATIENCE * self.budget_s:
            return None
        return (
            f"it computes about {times:,.0f} times as much as the function alone, which is about "
            f"{times * self.call_s:,.0f} s a call"
        )


def pace_of(program: Program, budget_s: float) -> Pace:
    """The pace of a function, which has been called before."""
    # One call may be disturbed, by a hundred times what it takes.
    call_s = fastest_s(program.run, jax.block_until_ready, _CALLS, budget_s)
    return Pace(call_s, program.work, budget_s)


# --- What the jaxpr of a function tells without running it ---


def work(jaxpr: Jaxpr) -> int:
    """How many numbers a program computes, about: the turns of each `scan` are counted.

    Two programs that are made of the same operations can be compared by it. The steps of a
    `while_loop`, which nobody knows, count as one.
    """
    total = 0
    for equation in jaxpr.eqns:
        inner = sum(work(each) for each in jaxprs_in_params(equation.params))
        own = sum(math.prod(getattr(each.aval, "shape", ())) for each in equation.outvars)
        total += inner * equation.params["length"] if equation.primitive.name == "scan" else inner
        total += own
    return total


def largest_epsilon(jaxpr: Jaxpr) -> float:
    """The machine epsilon of the least precise floating-point dtype that a program computes in."""
    dtypes = {
        getattr(each.aval, "dtype", None) for found in equations_in(jaxpr) for each in found.outvars
    }
    inexact = [each for each in dtypes if each is not None and jnp.issubdtype(each, jnp.inexact)]
    return max((float(jnp.finfo(each).eps) for each in inexact), default=0.0)
