"""Which bars are shown, and how far each is: what compiled programs call."""

import atexit
import dataclasses
import itertools
import threading
import time
from collections.abc import Callable
from typing import Any, TextIO

import numpy as np

from ._displays import Display, open_display

_MOST_OPEN = 1000
"""Runs whose bars may be open: of more, some must have ended without a word."""


@dataclasses.dataclass(frozen=True)
class Level:
    """One of several loops, each inside the one before.

    - `total`: the number of its steps, or `None`.
    - `every`: once in so many steps Python is called; `None` for rarer and rarer.
    """

    total: int | None
    description: str
    every: int | None

    def line(self, step: int) -> str:
        text = f"step {step + 1}" if self.total is None else f"step {step + 1}/{self.total}"
        return f"{self.description}: {text}" if self.description else text


@dataclasses.dataclass(frozen=True)
class Shown:
    """What is known of a bar before it runs: the loops that it stands in, its own last, and how it
    is shown.
    """

    levels: tuple[Level, ...]
    kind: str
    interval_s: float
    stream: TextIO | None

    def is_end(self, steps: tuple[int, ...]) -> bool:
        """Whether these are the last steps of all its loops."""
        pairs = zip(self.levels, steps, strict=True)
        return all(level.total is not None and step + 1 >= level.total for level, step in pairs)


@dataclasses.dataclass
class _Bar:
    display: Display
    steps: tuple[int, ...]
    shown_at_s: float
    is_at_end: bool = False


class Board:
    """The bars that are shown at this moment.

    **Arguments:**

    - `clock`: the time in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self._lock = threading.RLock()
        self._numbers = itertools.count(1)
        # The bars of a run of a program that belong together. A run that is closed is not there.
        self._runs: dict[int, dict[Shown, _Bar]] = {}

    def new_number(self) -> np.ndarray:
        """The number of a run: a compiled program carries it along."""
        with self._lock:
            number = next(self._numbers)
            self._runs[number] = {}
            if len(self._runs) > _MOST_OPEN:
                self.close(next(iter(self._runs)))
            return np.asarray(number, np.int32)

    def show(self, shown: Shown, number: Any, *steps: Any) -> None:
        """Shows that these steps are done, unless they have been already."""
        steps = tuple(map(int, steps))
        with self._lock:
            bars = self._runs.get(int(number))
            if bars is None:
                return
            bar = bars.get(shown)
            if bar is None:
                display = open_display(shown.kind, shown.levels[-1], shown.stream)
                bar = bars[shown] = _Bar(display, (-1,), self._clock())
            # Loops run steps again for the reverse mode.
            if steps <= bar.steps:
                return
            bar.steps, bar.is_at_end = steps, shown.is_end(steps)
            now_s = self._clock()
            if bar.is_at_end or now_s - bar.shown_at_s >= shown.interval_s:
                bar.shown_at_s = now_s
                self._draw(shown, bar)
            if all(each.is_at_end for each in bars.values()):
                self.close(number)

    def _draw(self, shown: Shown, bar: _Bar) -> None:
        pairs = zip(shown.levels, bar.steps, strict=True)
        bar.display.show(bar.steps[-1] + 1, ", ".join(level.line(step) for level, step in pairs))

    def close(self, number: Any) -> None:
        """Shows how far the bars of a run came, and closes them."""
        with self._lock:
            for shown, bar in self._runs.pop(int(number), {}).items():
                if not bar.is_at_end:
                    self._draw(shown, bar)
                bar.display.close()

    def close_all(self) -> None:
        """Closes what is open: a terminal gets its cursor back."""
        with self._lock:
            for number in list(self._runs):
                self.close(number)


BOARD = Board()
atexit.register(BOARD.close_all)
