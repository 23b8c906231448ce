"""`Run`: the newest state of a training run, and the losses read so far."""

import collections
import itertools
import math
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, Generic

import jax
import numpy as np
import optax

from ._batch_iterator import Stack
from ._checks import check_not_deleted
from ._state import Model, TrainState, check_state
from ._stepper import Pending, Step, Stepper


class Run(Generic[Model]):
    """A training run, as callbacks see it.

    - `state`: the state after the last step. The next step donates its arrays, so copy the state if
      you want to keep it.
    - `num_steps`: total number of steps of the run.
    - `steps`: number of steps made so far. Steps before the run was resumed count too; their number
      is `steps_before`.
    - `history`: the losses of the steps that this call of `fit` made, if they were already read.
    - `skipped`: indices in `history` of steps whose update was skipped.
    - `loss`: the mean loss between the last two logs, without skipped steps; NaN before the first
      log.
    - `aux`: the means of other numbers, by name, over the same steps as `loss`. A step returns
      these numbers in a dict after the loss; see `make_step(..., has_aux=True)`.
    - `metrics`: metrics of the last evaluation by name; empty before the first evaluation.
    - `evaluated_at`: step of the last evaluation; -1 before the first evaluation.
    - `evaluate_every`: number of steps between evaluations; `None` if there are no evaluations, or
      only at the end.
    - `checkpoint`: folder of the last checkpoint; `None` before the first checkpoint.
    - `position`: the `position` of the batches; `None` if the batches have no position.
    - `callbacks`: all callbacks of the run.
    - `result`: a state that `fit` returns instead of the last state, or `None`.
    """

    def __init__(
        self, state: TrainState[Model], num_steps: int, steps: int = 0, max_skipped: int = 10
    ) -> None:
        self._stepper = Stepper(state)
        self._max_skipped = max_skipped
        self.num_steps = num_steps
        self.steps = self.steps_before = steps
        self.history: list[float] = []
        self.skipped: list[int] = []
        self.loss = math.nan
        self.aux: Mapping[str, float] = {}
        self._aux_since_log: dict[str, list[float]] = {}
        self.metrics: Mapping[str, float] = {}
        self.evaluated_at = -1
        self.evaluate_every: int | None = None
        self.checkpoint: pathlib.Path | None = None
        self.position: Any = None
        self.callbacks: Sequence[Any] = ()
        self.result: TrainState[Model] | None = None
        self.divergence: str | None = None
        self.end: str | None = None
        self.notes: list[str] = []
        self._first_step = int(state.step)
        self._pending: list[Pending] = []
        self.num_unread = 0
        self._num_logged = 0

    @property
    def state(self) -> TrainState[Model]:
        return self._stepper.state

    @state.setter
    def state(self, state: TrainState[Model]) -> None:
        check_state(state, "run.state")
        check_not_deleted(state, "state", "run.state")
        self._stepper.state = state
        # The new state has its own step, `state.step`.
        self._first_step = int(state.step) - len(self.history)

    @property
    def learning_rate(self) -> float | None:
        """The learning rate of the last step. It is `None` if the optimiser was not made with
        `optax.inject_hyperparams`.
        """
        found = optax.tree_utils.tree_get_all_with_path(self.state.optimiser_state, "learning_rate")
        # The name `learning_rate` is also used for the state of a schedule, so keep only scalars.
        rates = [value for _, value in found if isinstance(value, jax.Array) and value.ndim == 0]
        return float(rates[0]) if len(rates) == 1 else None

    def stop(self, message: str) -> None:
        """Ends the run after the current hooks. `FitResult.message` will begin with `message`."""
        self.end = self.end or message

    def note(self, message: str) -> None:
        """Adds a sentence to `FitResult.message`."""
        self.notes.append(message)

    def tell_checkpoint(self, folder: pathlib.Path) -> None:
        """Reports a completed checkpoint to all callbacks."""
        self.checkpoint = folder
        for callback in self.callbacks:
            callback.on_checkpoint(self)

    # --- methods that only the loop calls ---

    def advance(self, step: Step, batches: Stack, steps_per_call: int) -> Any:
        """Makes one step for each batch. Returns an array that is ready after the last step."""
        pending = self._stepper.advance(step, batches, steps_per_call)
        self._pending.append(pending)
        self.num_unread += pending.count
        self.steps += pending.count
        return pending.losses

    def read(self) -> None:
        """Waits for the losses on the device. Sets `divergence` if a step was bad, that is, if its
        loss or its update was not finite.

        If the bad step refused its update, `state` is the state before the bad step.
        """
        if not self._pending:
            return
        losses, num_good, were_skipped = self._stepper.read_losses(self._pending, self._good_step)
        rows = jax.device_get([calls.aux for calls in self._pending])
        counts = [calls.count for calls in self._pending]
        # Clear the list only now, so that no losses are lost if Ctrl-C interrupts the wait.
        self._pending, self.num_unread = [], 0
        # If `num_good` is `None`, no step refused its update. Steps may have no check, so a loss
        # that is not finite also shows a bad step.
        is_kept = num_good is not None
        if num_good is None:
            are_bad = [
                not math.isfinite(loss) and not was_skipped
                for loss, was_skipped in zip(losses, were_skipped, strict=True)
            ]
            num_good = [*are_bad, True].index(True)
        before = len(self.history)
        self.skipped += [before + place for place in range(num_good) if were_skipped[place]]
        self.history += losses[:num_good]
        steps = iter(were_skipped[:num_good])
        for count, row in zip(counts, rows, strict=True):
            are_kept = [not was_skipped for was_skipped in itertools.islice(steps, count)]
            for name, values in row.items():
                kept = itertools.compress(np.ravel(values).tolist(), are_kept)
                self._aux_since_log.setdefault(name, []).extend(kept)
        self.steps -= len(losses) - num_good
        # After an interrupt, the loss of the last good step may be missing.
        if num_good < len(losses):
            self.divergence = self._describe(losses[num_good], is_kept)
        elif not self._stepper.is_finite(of_any_step=False):
            self.divergence = _not_finite(f"after step {self._good_step}")
        # In a sequence of successive indices, such as 7, 8, 9, the index minus its place in the
        # list is constant.
        rows = collections.Counter(index - place for place, index in enumerate(self.skipped))
        longest = max(rows.values(), default=0)
        if longest > self._max_skipped and self.divergence is None:
            self.divergence = (
                f"The updates of {longest} steps in a row were not finite and were skipped, more "
                f"than max_skipped={self._max_skipped}."
            )

    def log(self) -> None:
        """Sets `loss` and `aux` to the means since the last log."""
        skipped = {*self.skipped}
        steps = range(self._num_logged, len(self.history))
        recent = [self.history[step] for step in steps if step not in skipped]
        self._num_logged = len(self.history)
        self.loss = math.fsum(recent) / len(recent) if recent else math.nan
        since, self._aux_since_log = self._aux_since_log, {}
        self.aux = {name: math.fsum(each) / len(each) for name, each in since.items() if each}

    @property
    def _good_step(self) -> int:
        """The number of the last good step whose loss was read."""
        return self._first_step + len(self.history)

    def _describe(self, loss: float, is_kept: bool) -> str:
        """Describes the bad step. `is_kept` is true if the bad step refused its update."""
        step = self._good_step + 1
        if not is_kept:
            return (
                f"The loss was {loss} in step {step}, and the last good state was not kept: make "
                "the step with `make_step(..., check_finite=True)`, or call `keep_if_finite` in it."
            )
        if math.isfinite(loss):
            array = "A parameter or an array of the optimiser's or the model's state"
            if self.state.loss_scale is not None:
                array = f"A gradient at the smallest loss scale, {array[0].lower()}{array[1:]}"
            what = f"{array} became NaN or infinite in step {step}, at a loss of {loss:.6g}"
        else:
            what = f"The loss was {loss} in step {step}"
        if not self._stepper.is_finite(of_any_step=True):
            return f"{what}. {_not_finite(f'after step {step - 1}')}"
        return f"{what}; the state is the one after step {step - 1}."


def _not_finite(when: str) -> str:
    return (
        f"The state {when} is not finite, although its gradients were: the optimiser made a "
        "parameter or an array of its own state NaN or infinite. A step of `make_step(..., "
        'check_finite="state")` keeps the state before such an update.'
    )
