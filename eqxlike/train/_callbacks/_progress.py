"""How far training is, how fast, and how long it will take."""

import contextlib
import time
from typing import TextIO

from ..._progress import OnStep, run_progress
from .._run import Run
from ._callback import Callback


class Progress(Callback):
    """Shows the step, the loss, the learning rate, metrics, and steps a second since the last log.

    A terminal gets a bar with the time that is left, if `rich` is installed; anything else gets
    lines of text. It is shown anew at each log: `fit(..., log_every=)` says how often that is.

    **Arguments:**

    - `label`: what is trained.
    - `stream`: where to write, standard error by default.
    - `num_lines`: at most so many lines of text, spread evenly over the steps.

    >>> from eqxlike import train
    >>> callback = train.Progress("digits")
    """

    def __init__(
        self, label: str = "training", *, stream: TextIO | None = None, num_lines: int = 10
    ) -> None:
        self.label, self.stream, self.num_lines = label, stream, num_lines
        self._shown = contextlib.ExitStack()
        self._on_step: OnStep | None = None
        self._last = (0, 0.0)

    def on_start(self, run: Run) -> None:
        """Shows a bar, where there is to be one."""
        self._on_step = self._shown.enter_context(
            run_progress(run.num_steps, self.label, stream=self.stream, num_lines=self.num_lines)
        )
        self._last = run.steps, time.perf_counter()

    def on_log(self, run: Run) -> None:
        """Says how far it is."""
        if self._on_step is None:
            return
        parts = [f"loss {run.loss:.4g}"]
        if run.learning_rate is not None:
            parts.append(f"rate {run.learning_rate:.3g}")
        parts += [f"{name} {value:.4g}" for name, value in run.metrics.items()]
        # Not since the start: that would count the time of compiling for long.
        (steps, then), now = self._last, time.perf_counter()
        self._last = run.steps, now
        parts.append(f"{(run.steps - steps) / max(now - then, 1e-9):.3g} steps/s")
        self._on_step(run.steps, ", ".join(parts))

    def close(self) -> None:
        """Takes the bar away."""
        self._shown.close()
        self._on_step = None
