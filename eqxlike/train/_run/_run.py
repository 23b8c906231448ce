"""A training under way: the newest state, and the losses that were read."""

import functools
import math
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array

from ..._partition import flatten
from ..._pytree import tree_at
from ..._transforms import JitFunction
from .._state import Model, TrainState
from ._flat_steps import Leaves, StateChanged, many_steps, single_step, state_and_loss, take_apart
from ._stack import Stack
from ._undo import Call, Undo

Batch = TypeVar("Batch")
Step = Callable[[TrainState[Model], Batch], tuple[TrainState[Model], *tuple[Any, ...]]]


class _Pending(NamedTuple):
    """Losses on the device, of one step or of the first `count` of many.

    - `were_halted`: whether the state was halted after each; `None` once it is known that the step
      adds one to `state.step`, which says by itself how many steps were good.
    """

    losses: Any
    were_halted: Array | None
    count: int


class Run(Generic[Model]):
    """A training under way, as callbacks see it.

    - `state`: after the last step. The next step takes its arrays: keep a copy, not these.
    - `num_steps`: how many steps the run is to have made at its end.
    - `steps`: how many it has made, with those before it was resumed, `steps_before`.
    - `history`: the losses of the steps that this call of `fit` made, as far as they were read.
    - `loss`: the mean of those since the last log; NaN before the first one.
    - `metrics`: what the last evaluation gave, by name; empty before the first one.
    - `evaluated_at`: after which step that was; -1 before the first one.
    - `evaluate_every`: steps between evaluations; `None` where at most the end is evaluated.
    - `checkpoint`: the folder of the last checkpoint; `None` before the first one.
    - `position`: where the stream of batches is, if it can say.
    - `callbacks`: those of the run.
    - `result`: the state that `fit` is to return, if that is not the last one.
    """

    def __init__(self, state: TrainState[Model], num_steps: int, steps: int = 0) -> None:
        # One of the two is always there: the state, or its arrays, which go from call to call.
        self._state: TrainState[Model] | None = state
        self._leaves: Leaves | None = None
        self._form = take_apart(state)[1]
        self._may_be_flat = True
        self._undo: Undo | None = None
        self._has_begun = False
        self._calls: dict[int, Call] = {}
        self.num_steps = num_steps
        self.steps = self.steps_before = steps
        self.history: list[float] = []
        self.loss = math.nan
        self.metrics: Mapping[str, float] = {}
        self.evaluated_at = -1
        self.evaluate_every: int | None = None
        self.checkpoint: pathlib.Path | None = None
        self.position: Any = None
        self.callbacks: Sequence[Any] = ()
        self.result: TrainState[Model] | None = None
        self.on_checkpoint: Callable[[Run[Model]], None] = lambda run: None
        self.divergence: str | None = None
        self.end: str | None = None
        self.notes: list[str] = []
        self._first_step = int(state.step)
        self._pending: list[_Pending] = []
        self._num_pending = 0
        self._counts_steps = False
        self._num_logged = 0

    @property
    def state(self) -> TrainState[Model]:
        if self._state is None:
            assert self._leaves is not None
            state: TrainState[Model] = self._form.merge(self._leaves)
            self._state = state
            return state
        return self._state

    @state.setter
    def state(self, state: TrainState[Model]) -> None:
        self._state, self._leaves = state, None
        if self._undo is not None:
            self._undo.clear()
        # It may be one of another step.
        self._first_step = int(state.step) - len(self.history)

    @property
    def learning_rate(self) -> float | None:
        """That of the last step, where the optimiser keeps it: made with `inject_hyperparams`."""
        found = optax.tree_utils.tree_get_all_with_path(self.state.optimiser_state, "learning_rate")
        # The state of a schedule has that name too.
        rates = [value for _, value in found if isinstance(value, jax.Array) and value.ndim == 0]
        return float(rates[0]) if len(rates) == 1 else None

    def stop(self, message: str) -> None:
        """Ends the run after this moment; `FitResult.message` begins with `message`."""
        self.end = self.end or message

    def note(self, message: str) -> None:
        """Adds a sentence to `FitResult.message`."""
        self.notes.append(message)

    def tell_checkpoint(self, folder: pathlib.Path) -> None:
        """Reports a checkpoint that is in its place to all callbacks."""
        self.checkpoint = folder
        self.on_checkpoint(self)

    # --- for the loop ---

    def advance(self, step: Step, batches: Stack, steps_per_call: int) -> Any:
        """A step on each batch: one by one, or where there may be more in a call, in one call."""
        # One statement makes each call: whatever interrupts it, what is here was given to none.
        if steps_per_call > 1 or (self._may_be_flat and isinstance(step, JitFunction)):
            leaves = self._opened()
            if not self._has_begun:
                self._undo = Undo.of(step, leaves, self._form, batches)
                self._has_begun = True
            call = self._call(step, steps_per_call)
            if self._undo is not None:
                self._undo.begin(leaves)
                if steps_per_call == 1:
                    # Before the call: JAX may read an array of NumPy after it, in place.
                    batches.keep()
            try:
                self._leaves, losses, were_halted = call(leaves, batches)
            except StateChanged:
                # It came while tracing: nothing was given away.
                if self._undo is None and steps_per_call > 1:
                    raise
                self._may_be_flat = self._undo is not None
                self._undo = None
                self._calls.clear()
                return self.advance(step, batches, steps_per_call)
            if self._undo is not None:
                self._undo.add(call, batches)
        else:
            # As it is: a step that is not compiled may do anything.
            self._state, self._leaves = self.state, None
            self._state, losses = state_and_loss(step(self._state, batches.first))
            # A copy: the next step may donate it.
            were_halted = None if self._counts_steps else jnp.copy(self._state.is_halted)
        count = batches.count
        self._pending.append(_Pending(losses, were_halted, count))
        self._num_pending += count
        self.steps += count
        return losses

    def _opened(self) -> Leaves:
        """The arrays of the state; the state is built again when somebody asks for it."""
        if self._leaves is None:
            self._leaves, form = take_apart(self._state)
            if form != self._form:
                self._form = form
                self._calls.clear()
        self._state = None
        return self._leaves

    def _call(self, step: Step, steps_per_call: int) -> Call:
        call = self._calls.get(steps_per_call)
        if call is None:
            own, rest = flatten(self._undo.step if self._undo else step, by_identity=True)
            if steps_per_call == 1:
                program = single_step(rest, self._form)
                call = lambda leaves, batches: program(own, leaves, batches.first)  # noqa: E731
            else:
                # What a plain function reads beside its arguments may be other than in the last
                # run: it is traced again.
                is_plain = not isinstance(step, JitFunction)
                make = many_steps.__wrapped__ if is_plain else many_steps
                call = functools.partial(make(rest, self._form, steps_per_call), own)
            self._calls[steps_per_call] = call
        return call

    @property
    def is_full(self) -> bool:
        """Whether the batches kept for a repeat take so much memory that losses should be read."""
        return self._undo is not None and self._undo.is_full

    @property
    def num_unread(self) -> int:
        """Steps whose losses were not read yet."""
        return self._num_pending

    def read(self) -> None:
        """Waits for the losses on the device, and sets `divergence` if one of their steps was bad.

        The state is then that before it: either the step kept it (`keep_if_finite`), or it has no
        guard, and `_undo` repeats the steps since the last read.
        """
        if not self._pending:
            return
        pending = self._pending
        losses, step, is_halted = self._judged([each.losses for each in pending])
        num_counted, were_halted = step - self._first_step - len(self.history), []
        if is_halted and not self._counts_steps:
            were_halted = jax.device_get([each.were_halted for each in pending])
        # Ctrl-C, while all that was waited for, has lost nothing.
        self._pending, self._num_pending = [], 0
        if is_halted:
            num_good = num_counted
            if not self._counts_steps:
                num_good = [*map(bool, _as_list(pending, were_halted)), True].index(True)
            self.history += losses[:num_good]
            # A step that was interrupted may have no loss.
            if num_good < len(losses):
                self.divergence = self._describe(losses[num_good])
            self.steps -= len(losses) - num_good
            return
        self._counts_steps = num_counted == len(losses)
        for index, loss in enumerate(losses):
            if not math.isfinite(loss):
                self.divergence = (
                    f"The loss was {loss} in step {self._failed_step}. The step did not keep its "
                    "last good state: make it with `make_step(..., check_finite=True)`, or call "
                    "`keep_if_finite` in it."
                )
                self.steps -= len(losses) - index
                return
            self.history.append(loss)

    def _judged(self, losses: list[Any]) -> tuple[list[float], int, bool]:
        """The losses as numbers, the step of the newest good state, and whether a bad one came."""
        undo = self._undo
        if undo is None:
            numbers = _as_list(self._pending, jax.device_get(losses))
            return numbers, int(self.state.step), bool(self.state.is_halted)
        leaves = self._opened()
        verdict = undo.judge(leaves, self._form, losses)
        numbers = _as_list(self._pending, verdict.losses)
        if verdict.is_good and all(map(math.isfinite, numbers)):
            undo.clear(verdict.joined)
            return numbers, verdict.step, False
        self._leaves, self._state = undo.last_good(self._form), None
        undo.clear()
        self._counts_steps = True
        num_good = int(self.state.step) - self._first_step - len(self.history)
        is_halted = num_good < len(numbers)
        if is_halted:
            halted = jnp.ones((), bool)
            self._state = tree_at(lambda state: state.is_halted, self.state, halted)
            self._leaves = None
        return numbers, int(self.state.step), is_halted

    def log(self) -> None:
        """Sets `loss` to the mean of what was read since the last log."""
        recent = self.history[self._num_logged :]
        self._num_logged = len(self.history)
        self.loss = math.fsum(recent) / len(recent) if recent else math.nan

    @property
    def _failed_step(self) -> int:
        return self._first_step + len(self.history) + 1

    def _describe(self, loss: float) -> str:
        failed = self._failed_step
        if math.isfinite(loss):
            array = "A parameter, or what the optimiser or the model keeps,"
            if self.state.loss_scale is not None:
                array = f"A gradient at the smallest loss scale, {array[0].lower()}{array[1:]}"
            what = f"{array} became NaN or infinite in step {failed}, at a loss of {loss:.6g}"
        else:
            what = f"The loss was {loss} in step {failed}"
        return f"{what}; the state is that after step {failed - 1}."


def _as_list(pending: Sequence[_Pending], values: Sequence[Any]) -> list[float]:
    """The numbers of all steps: of each call one, or the first `count` of an array."""
    numbers: list[float] = []
    for each, value in zip(pending, values, strict=True):
        if np.ndim(value) == 0:
            numbers.append(float(value))
        else:
            numbers += value[: each.count].tolist()
    return numbers
