"""Programs that would take longer than anybody waits for, known before they run."""

import dataclasses
import math
import time

import jax

from ._program import Program

_PATIENCE = 30
"""A call may be predicted to take so many times the budget. Nobody can interrupt one."""

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
    fastest_s, spent_s = math.inf, 0.0
    # One call may be disturbed, by a hundred times what it takes.
    for _ in range(_CALLS):
        start_s = time.perf_counter()
        jax.block_until_ready(program.run())
        call_s = time.perf_counter() - start_s
        fastest_s, spent_s = min(fastest_s, call_s), spent_s + call_s
        if spent_s > budget_s:
            break
    return Pace(fastest_s, program.work, budget_s)
