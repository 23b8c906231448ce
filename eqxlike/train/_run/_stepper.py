"""The steps of a run, each call by the fastest way that the step allows."""

import functools
import math
import re
from collections.abc import Callable, Sequence
from typing import Any, Generic, Literal, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jaxtyping import Array

from ..._partition import flatten
from ..._pytree import is_array, listed, paths_without_numbers, tree_at
from ..._transforms import EqxlikeRuntimeError, JitFunction
from .._guards import may_skip, was_refused
from .._state import Model, TrainState
from ._flat_steps import Leaves, StateChanged, many_steps, single_step, state_and_loss, take_apart
from ._stack import Stack
from ._undo import Call, Undo

Batch = TypeVar("Batch")
Step = Callable[[TrainState[Model], Batch], tuple[TrainState[Model], *tuple[Any, ...]]]


class Pending(NamedTuple):
    """Losses on the device, of one step or of the first `count` of many.

    - `were_refused`: whether each update was refused or skipped; `None` once it is known that the
      step increments `state.step`, which then counts the good steps.
    """

    losses: Any
    were_refused: Array | None
    count: int


_DONATED = (
    "Donated to the step that failed, and so no longer there: the state of this run. The `state` "
    "that fit got was copied, and is as it was."
)


class Stepper(Generic[Model]):
    """The newest state, and the calls that make steps on it."""

    def __init__(self, state: TrainState[Model]) -> None:
        # One of the two is always there: the state, or its arrays, which go from call to call.
        self._state: TrainState[Model] | None = state
        self._leaves: Leaves | None = None
        self._form = take_apart(state)[1]
        # On the arrays of the state, without the guard of the step or with it; or, in calls of one
        # step, on the state as it is.
        self._way: Undo | Literal["undecided", "guarded", "on state"] = "undecided"
        self._calls: dict[int, Call] = {}
        self._counts_steps = False

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

    @property
    def is_full(self) -> bool:
        """Whether the batches kept for a repeat take so much memory that losses should be read."""
        return isinstance(self._way, Undo) and self._way.is_full

    @property
    def _undo(self) -> Undo | None:
        return self._way if isinstance(self._way, Undo) else None

    def advance(self, step: Step, batches: Stack, steps_per_call: int) -> Pending:
        """A step on each batch: one by one, or where there may be more in a call, in one call."""
        # One statement makes each call: whatever interrupts it, what is here was given to none.
        if steps_per_call == 1 and (self._way == "on state" or not isinstance(step, JitFunction)):
            # As it is: a step that is not compiled may do anything.
            self._state, self._leaves = self.state, None
            self._state, losses = state_and_loss(step(self._state, batches.first))
            were_refused = None if self._counts_steps else was_refused(self._state)
            return Pending(losses, were_refused, batches.count)
        leaves = self._opened()
        if self._way == "undecided":
            if paths := paths_without_numbers(batches.first, "batch"):
                raise TypeError(f"fit expected batches of numbers; got {listed(paths)}.")
            self._way = Undo.of(step, leaves, self._form, batches) or "guarded"
        call, undo = self._call(step, steps_per_call), self._undo
        if undo is not None:
            undo.begin(leaves)
            if steps_per_call == 1:
                # Before the call: JAX may read an array of NumPy after it, in place.
                batches.keep()
        try:
            self._leaves, losses, were_refused = call(leaves, batches)
        except StateChanged:
            # It came while tracing: nothing was given away.
            if undo is None and steps_per_call > 1:
                raise
            self._way = "on state" if undo is None else "guarded"
            self._calls.clear()
            return self.advance(step, batches, steps_per_call)
        except EqxlikeRuntimeError as error:
            if getattr(error, "__notes__", ()):
                # It names arrays by their places in a list that nobody else knows.
                error.__notes__ = [_DONATED]
            raise
        except (ValueError, jax.errors.JaxRuntimeError) as error:
            # Likewise if a batch holds an array of the state.
            arrays = [
                f"state{jtu.keystr(path)}"
                for path, leaf in jtu.tree_leaves_with_path(self._form.merge(leaves))
                if is_array(leaf)
            ]
            name = functools.partial(re.sub, r"\bleaves\[(\d+)\]", lambda at: arrays[int(at[1])])
            error.__notes__ = [*map(name, getattr(error, "__notes__", ()))]
            raise
        if undo is not None:
            undo.add(call, batches)
        return Pending(losses, were_refused, batches.count)

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
            # JAX runs a program again to find a NaN: its arguments must not be donated.
            donates = not (jax.config.jax_debug_nans or jax.config.jax_debug_infs)  # pyright: ignore
            if steps_per_call == 1:
                program = single_step(rest, self._form, donates)
                call = lambda leaves, batches: program(own, leaves, batches.first)  # noqa: E731
            else:
                # What a plain function reads beside its arguments may be other than in the last
                # run: it is traced again.
                is_plain = not isinstance(step, JitFunction)
                make = many_steps.__wrapped__ if is_plain else many_steps
                call = functools.partial(make(rest, self._form, donates, steps_per_call), own)
            self._calls[steps_per_call] = call
        return call

    def judge(
        self, pending: Sequence[Pending], first_step: int
    ) -> tuple[list[float], int | None, list[bool]]:
        """Waits for losses, and sees whether the state became bad on the way to them.

        The state is then the last good one: either the step kept it (`keep_if_finite`), or it has
        no guard, and `Undo` repeats the steps.

        **Arguments:**

        - `first_step`: the step of the state before them.

        **Returns:** the losses as numbers; the number of steps before the state became bad, or
        `None` if it did not; and for each step before, whether it was skipped.
        """
        losses, undo = [calls.losses for calls in pending], self._undo
        were_refused, skips = [False] * sum(calls.count for calls in pending), False
        if undo is None:
            numbers = _as_list(pending, jax.device_get(losses))
            num_good, skips = int(self.state.step) - first_step, may_skip(self.state)
            # A skipped step still increments `step`.
            is_bad = bool(self.state.is_halted) and num_good < len(numbers)
            if (is_bad or skips) and not self._counts_steps:
                flags = jax.device_get([calls.were_refused for calls in pending])
                were_refused = [*map(bool, _as_list(pending, flags))]
            if is_bad and not self._counts_steps:
                # The step may not increment `step`.
                num_good = max(num_good, [*were_refused, True].index(True))
        else:
            verdict = undo.judge(self._opened(), self._form, losses)
            numbers = _as_list(pending, verdict.losses)
            num_good, is_bad = verdict.step - first_step, False
            if verdict.is_good and all(map(math.isfinite, numbers)):
                undo.clear(verdict.joined)
            else:
                self.state = self._form.merge(undo.last_good(self._form))
                num_good = int(self.state.step) - first_step
                is_bad = num_good < len(numbers)
                if is_bad:
                    halted = jnp.ones((), bool)
                    self.state = tree_at(lambda state: state.is_halted, self.state, halted)
        if is_bad:
            return numbers, num_good, were_refused
        self._counts_steps = num_good == len(numbers) and not skips
        return numbers, None, were_refused


def _as_list(pending: Sequence[Pending], values: Sequence[Any]) -> list[float]:
    """The numbers of all steps: of each call one, or the first `count` of an array."""
    numbers: list[float] = []
    for call, value in zip(pending, values, strict=True):
        if np.ndim(value) == 0:
            numbers.append(float(value))
        else:
            numbers += value[: call.count].tolist()
    return numbers
