"""The `EarlyStopping` callback."""

import math
import warnings
from collections.abc import Callable
from typing import Any, Literal

from ..._check_numbers import whole_number
from ..._traceback import stacklevel_of_user
from .._run import Run
from .._state import copy_arrays
from ._callback import Callback, metric_of, mode_of


class EarlyStopping(Callback):
    """Ends training when a metric stops improving, and returns the best state.

    **Arguments:**

    - `metric`: name of a metric that `evaluate` returns.
    - `patience`: training ends after this many evaluations in a row without an improvement.
    - `mode`: `"min"` if the smallest metric is the best, `"max"` if the largest is. Only a metric
      with `loss` in its name has a default, `"min"`.
    - `min_delta`: an improvement counts only if the metric improves by more than this number.
    - `restore_best`: whether `fit` returns the best state instead of the last state. `True` keeps a
      copy of the best state in memory.

    A metric that is NaN counts as no improvement. If the first metric is NaN, there is a warning.

    Checkpoints save the best state too. A resumed run ends at the same step as an uninterrupted
    run. If early stopping had already ended the run, the resumed run ends at once.

    **Raises:** `ValueError` if `mode` is missing or unknown, if `patience` is not a
    positive integer, or if `min_delta` is negative. When training starts, `ValueError` if `fit` has
    no evaluations. `KeyError` at the first evaluation that does not return the metric.

    >>> from eqxlike import train
    >>> callback = train.EarlyStopping("accuracy", patience=3, mode="max")
    """

    def __init__(
        self,
        metric: str,
        *,
        patience: int = 5,
        mode: Literal["min", "max"] | None = None,
        min_delta: float = 0.0,
        restore_best: bool = True,
    ) -> None:
        if not min_delta >= 0:
            raise ValueError(f"EarlyStopping: min_delta must be at least 0, got {min_delta!r}.")
        self.metric, self.min_delta = metric, min_delta
        self.mode = mode_of(mode, metric, "EarlyStopping")
        self.patience = whole_number(patience, "EarlyStopping: patience")
        self.restore_best = restore_best
        self._reset()

    def _reset(self) -> None:
        self.best = math.nan
        self.best_step = 0
        self._best_state: Any = None
        self._num_worse = 0

    def on_start(self, run: Run) -> None:
        """Resets the callback."""
        if run.evaluate_every is None:
            raise ValueError(
                "EarlyStopping needs evaluations: pass `evaluate` and `evaluate_every` to fit."
            )
        self._reset()

    def on_evaluate(self, run: Run) -> None:
        """Compares the metric with the best metric so far."""
        value = metric_of(run, self.metric, "EarlyStopping")
        if self._is_better(value):
            self.best, self.best_step, self._num_worse = value, run.steps, 0
            if self.restore_best:
                self._best_state = copy_arrays(run.state)
            return
        self._num_worse += 1
        if math.isnan(value) and math.isnan(self.best) and self._num_worse == 1:
            warnings.warn(
                f"EarlyStopping: {self.metric} is NaN after step {run.steps}, which counts as no "
                f"improvement; {self.patience} evaluations in a row without improvement end the "
                "run. Check that `evaluate` has at least one example and does not divide by zero.",
                stacklevel=stacklevel_of_user(),
            )
        self._stop_if_due(run)

    def _stop_if_due(self, run: Run) -> None:
        if self._num_worse >= self.patience:
            best = f"did not improve on {self.best:.6g}, at step {self.best_step},"
            what = "was NaN" if math.isnan(self.best) else best
            run.stop(
                f"Stopped after step {run.steps}: {self.metric} {what} in {self.patience} "
                "evaluations."
            )

    def _is_better(self, value: float) -> bool:
        if math.isnan(value):
            return False
        gain = self.best - value if self.mode == "min" else value - self.best
        return math.isnan(self.best) or gain > self.min_delta

    def on_end(self, run: Run) -> None:
        """Sets the result to the best state."""
        if self._best_state is not None and self.best_step != run.steps:
            run.result = self._best_state
            run.note(f"The state is the best one, after step {self.best_step}.")

    @property
    def state_name(self) -> str:
        """The name contains the metric and the mode. So a resumed run with another metric does not
        use the saved state.
        """
        return f"EarlyStopping({self.metric!r}, mode={self.mode!r})"

    def save_state(self) -> dict[str, Any]:
        """The best metric, its step, and the number of evaluations since that step."""
        return {
            "best": None if math.isnan(self.best) else self.best,
            "best_step": self.best_step,
            "num_worse": self._num_worse,
            "has_best_state": self._best_state is not None,
        }

    def load_state(self, run: Run, state: dict[str, Any]) -> None:
        """Restores the best metric. Ends the run if early stopping had already ended it.

        **Raises:** `ValueError` if `restore_best` is set but the checkpoint has no best state.
        """
        if self.restore_best and state["best"] is not None and not state["has_best_state"]:
            raise ValueError(
                "EarlyStopping: the resumed run had restore_best=False and did not save its best "
                f"state, of step {state['best_step']}: pass restore_best=False here too."
            )
        self.best = math.nan if state["best"] is None else state["best"]
        self.best_step, self._num_worse = state["best_step"], state["num_worse"]
        self._stop_if_due(run)

    def save_arrays(self) -> Any:
        """The best state."""
        return self._best_state

    def load_arrays(self, run: Run, read: Callable[[Any], Any]) -> None:
        """Reads the best state."""
        if self.restore_best:
            self._best_state = read(run.state)

    def close(self) -> None:
        """Frees the best state."""
        self._best_state = None
