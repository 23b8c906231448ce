"""`Schedule`: the steps after which logs, evaluations and callbacks are due."""

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ... import tree_pformat
from ..._check_numbers import hint_to_call, whole_number
from ..._traceback import stacklevel_of_user
from .._callbacks import Callback
from .._checks import check_callable, check_takes
from .._run import Run
from .._state import Model, TrainState

EvaluateState = Callable[[TrainState[Model]], Mapping[str, Any]]
"""A function that takes a state and returns metrics by name."""


class _OnLog(Callback):
    """A callback that calls the function that the user passed to `fit` as `on_log`."""

    def __init__(self, function: Callable[[int, float], None]) -> None:
        self.function = function

    def on_log(self, run: Run) -> None:
        self.function(run.steps, run.loss)


def checked_callbacks(
    callbacks: Sequence[Callback], on_log: Callable[[int, float], None] | None
) -> tuple[Callback, ...]:
    """Checks the callbacks. Converts `on_log` to a callback and appends it.

    **Raises:** `TypeError` if a callback is not a `Callback`, or if `on_log` is not callable.
    `ValueError` if the attribute `every` of a callback is not a positive integer.
    """
    if isinstance(callbacks, Callback):
        raise TypeError(f"fit expected a list of callbacks, got {callbacks!r}: put it in a list.")
    if on_log is not None:
        check_callable(on_log, "on_log(step, loss)")
    for index, callback in enumerate(callbacks):
        if not isinstance(callback, Callback):
            raise TypeError(
                f"fit expected a train.Callback at callbacks[{index}], got {callback!r}"
                f"{hint_to_call(callback)}."
            )
        if callback.every is not None:
            whole_number(callback.every, f"callbacks[{index}].every")
        elif type(callback).on_step is not Callback.on_step:
            warnings.warn(
                f"callbacks[{index}] has an `on_step` that is never called: set its attribute "
                "`every` to the number of steps between two calls.",
                stacklevel=stacklevel_of_user(),
            )
    return (*callbacks, *([] if on_log is None else [_OnLog(on_log)]))


class Schedule:
    """Decides after which steps logs, evaluations and callbacks are due, and runs them."""

    def __init__(
        self,
        evaluate: EvaluateState | None,
        callbacks: tuple[Callback, ...],
        log_every: int,
        evaluate_every: int | None,
    ) -> None:
        if evaluate is not None:
            check_callable(evaluate, "evaluate(state)")
            hint = " Pass the function that `make_evaluate(measure, batches)` returns."
            check_takes(evaluate, "evaluate(state)", "fit", hint)
        elif evaluate_every is not None:
            raise ValueError(
                f"fit got evaluate_every={evaluate_every} but no `evaluate`: pass `evaluate`, for "
                "example from `make_evaluate`."
            )
        self.evaluate, self.callbacks = evaluate, callbacks
        self.log_every = log_every if callbacks else None
        self.evaluate_every = evaluate_every
        periods = [self.log_every, self.evaluate_every, *(each.every for each in callbacks)]
        self._periods = [period for period in periods if period is not None]
        self.evaluations: list[tuple[int, Mapping[str, float]]] = []
        self._logged_at = -1

    def next_after(self, run: Run) -> int:
        """The next step after which a log, an evaluation or a callback is due, or the last step."""
        steps = run.steps
        return min([run.num_steps, *(steps - steps % each + each for each in self._periods)])

    def at(self, run: Run) -> None:
        """Logs, evaluates and calls `on_step`, if they are due after the current step.

        Read the losses before you call this.
        """
        is_last, periods = run.steps >= run.num_steps, (self.log_every, self.evaluate_every)
        self._observe(run, *(is_last or (bool(each) and run.steps % each == 0) for each in periods))
        for callback in self.callbacks:
            if callback.every is not None and run.steps % callback.every == 0:
                callback.on_step(run)

    def at_end(self, run: Run) -> None:
        """Logs and evaluates after the last step, if this call of `fit` has made a step."""
        if run.steps > run.steps_before:
            self._observe(run, True, True)

    def _observe(self, run: Run, logs: bool, evaluates: bool) -> None:
        """Evaluates and logs, at most once per step. It evaluates first, so that the log can show
        the metrics.
        """
        is_log_due = logs and self.log_every is not None and self._logged_at != run.steps
        if is_log_due:
            self._logged_at = run.steps
            run.log()
        if evaluates:
            self._evaluate(run)
        if is_log_due:
            self.call_hook("on_log", run)

    def _evaluate(self, run: Run) -> None:
        """Evaluates the state, unless this step was already evaluated."""
        if self.evaluate is None or run.evaluated_at == run.steps:
            return
        run.evaluated_at = run.steps
        metrics = self.evaluate(run.state)
        if not isinstance(metrics, Mapping):
            raise TypeError(
                "fit expected `evaluate` to return a mapping from names to numbers, got "
                f"{metrics!r}."
            )
        run.metrics = {name: _as_number(name, value) for name, value in metrics.items()}
        self.evaluations.append((run.steps, run.metrics))
        self.call_hook("on_evaluate", run)

    def call_hook(self, hook: str, run: Run) -> None:
        """Calls a hook of every callback."""
        for callback in self.callbacks:
            getattr(callback, hook)(run)


def _as_number(name: str, value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"fit expected `evaluate` to return a number for {name!r}, got {tree_pformat(value)}."
        ) from error
