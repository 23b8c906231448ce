"""How many steps go into one call: a number, or the faster of two that are measured."""

import time
from collections.abc import Callable
from typing import Any, Literal

import jax

from ..._check_numbers import whole_number

StepsPerCall = int | Literal["auto"]

CHOICE = 16
CALLS = {1: 20, CHOICE: 3}
"""How many calls of one step, and of `CHOICE` steps, are timed, once each was compiled."""


class Pace:
    """How many steps go into the next call: always the same number."""

    message = ""
    """What was found out, in a sentence."""

    def __init__(self, steps_per_call: int) -> None:
        self.steps_per_call = steps_per_call

    def run(self, advance: Callable[[], Any], num_steps: int) -> None:
        """Calls `advance`, which makes `num_steps` steps and returns arrays of the last."""
        advance()


class MeasuredPace(Pace):
    """Single steps at first, then many a call, and then whichever took less time for a step.

    A call that compiles does not count. Nor does the time that batches take.
    """

    def __init__(self) -> None:
        super().__init__(1)
        self._is_settled = False
        self.message = (
            f"It was too short to measure whether {CHOICE} steps a call are faster than one."
        )
        self._per_step_us: dict[int, float] = {}
        self._calls: list[tuple[int, float]] = []

    def run(self, advance: Callable[[], Any], num_steps: int) -> None:
        """Calls `advance`, and measures its time until the number is chosen."""
        if self._is_settled:
            advance()
            return
        is_last = len(self._calls) == CALLS[self.steps_per_call]
        start = time.perf_counter()
        arrays = advance()
        if is_last or not self._calls:
            # What was dispatched before is not on this call's account, nor on the next one's.
            jax.block_until_ready(arrays)
        self._calls.append((num_steps, time.perf_counter() - start))
        if is_last:
            self._settle()

    def _settle(self) -> None:
        steps, seconds = map(sum, zip(*self._calls[1:], strict=True))
        self._per_step_us[self.steps_per_call], self._calls = 1e6 * seconds / steps, []
        if self.steps_per_call == 1:
            self.steps_per_call = CHOICE
            return
        singly, many = (self._per_step_us[steps] for steps in CALLS)
        self.steps_per_call, self._is_settled = (CHOICE if many < singly else 1), True
        self.message = (
            f"Chose {self.steps_per_call} a call: a step took {singly:.1f} us by itself, and "
            f"{many:.1f} us among {CHOICE}."
        )


def pace_of(steps_per_call: StepsPerCall) -> Pace:
    """The pace that an argument asks for.

    **Raises:** `ValueError` for what is neither a positive integer nor `"auto"`.
    """
    if steps_per_call == "auto":
        return MeasuredPace()
    if isinstance(steps_per_call, str):
        raise ValueError(
            f'steps_per_call must be an integer of at least 1, or "auto", got {steps_per_call!r}.'
        )
    return Pace(whole_number(steps_per_call, "steps_per_call"))
