"""The steps of a run, and whether its state is still good."""

import functools
import re
from collections.abc import Callable, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jaxtyping import Array

from ... import EqxlikeRuntimeError, is_array
from ...extend import JitFunction, flatten, listed, paths_without_numbers
from .._guards import is_finite_state, judges_gradients, may_skip, was_refused
from .._state import Model, TrainState
from ._flat_steps import (
    Aux,
    Form,
    Leaves,
    StateChanged,
    many_steps,
    read_returned,
    single_step,
    take_apart,
)
from ._stack import Stack

Batch = TypeVar("Batch")
Step = Callable[[TrainState[Model], Batch], tuple[TrainState[Model], *tuple[Any, ...]]]
Call = Callable[[Leaves, Stack], tuple[Leaves, Any, Array, Aux]]
"""Makes the steps of a stack on the arrays of a state, which it takes."""


class Pending(NamedTuple):
    """Losses on the device, of one step or of the first `count` of many.

    - `aux`: what the steps returned after the loss, by name.
    - `were_refused`: whether each update was refused or skipped; `None` once it is known that the
      step increments `state.step`, which then counts the good steps.
    """

    losses: Any
    were_refused: Array | None
    aux: Aux
    count: int


_DONATED = (
    "Donated to the step that failed, and so no longer there: the state of this run. The `state` "
    "that fit got was copied, and is as it was, unless fit has donate=True."
)


class Stepper(Generic[Model]):
    """The newest state, and the calls that make steps on it."""

    def __init__(self, state: TrainState[Model]) -> None:
        # One of the two is always there: the state, or its arrays, which go from call to call.
        self._state: TrainState[Model] | None = state
        self._leaves: Leaves | None = None
        self._form = take_apart(state)[1]
        # A step that changes more than arrays gets the state as it is, in calls of one step.
        self._takes_arrays = True
        self._step: Any = None
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

    def advance(self, step: Step, batches: Stack, steps_per_call: int) -> Pending:
        """A step on each batch: one by one, or where there may be more in a call, in one call."""
        # One statement makes each call: whatever interrupts it, what is here was given to none.
        is_first, self._step = self._step is None, step
        if steps_per_call == 1 and not (self._takes_arrays and isinstance(step, JitFunction)):
            # As it is: a step that is not compiled may do anything.
            self._state, self._leaves = self.state, None
            self._state, losses, aux = read_returned(step(self._state, batches.first))
            were_refused = None if self._counts_steps else was_refused(self._state)
            return Pending(losses, were_refused, aux, batches.count)
        if is_first and (paths := paths_without_numbers(batches.first, "batch")):
            raise TypeError(f"fit expected batches of numbers; got {listed(paths)}.")
        leaves = self._opened()
        call = self._call(step, steps_per_call)
        try:
            self._leaves, losses, were_refused, aux = call(leaves, batches)
        except StateChanged:
            # It came while tracing: nothing was given away.
            if steps_per_call > 1:
                raise
            self._takes_arrays = False
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
        return Pending(losses, were_refused, aux, batches.count)

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
            own, rest = flatten(step, by_identity=True)
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
        """Waits for losses, and sees whether a step refused its update on the way to them.

        **Arguments:**

        - `first_step`: the step of the state before them.

        **Returns:** the losses as numbers; the number of steps before the one that was refused, or
        `None` if none was; and for each step before, whether it was skipped.
        """
        losses, state = [calls.losses for calls in pending], self.state
        if len(losses) <= 256 and all(np.ndim(loss) == 0 for loss in losses):
            # An array is fetched in the time of one number. Padded to a multiple of 32, so that one
            # program serves most calls.
            found = jax.device_get(_stacked([*losses, *losses[-1:] * (-len(losses) % 32)]))
            numbers = _as_list(pending, found[: len(losses)])
        else:
            numbers = _as_list(pending, jax.device_get(losses))
        were_refused = [False] * len(numbers)
        num_good, skips = int(state.step) - first_step, may_skip(state)
        # A skipped step still increments `step`.
        is_bad = bool(state.is_halted) and num_good < len(numbers)
        if (is_bad or skips) and not self._counts_steps:
            flags = jax.device_get([calls.were_refused for calls in pending])
            were_refused = [*map(bool, _as_list(pending, flags))]
        if is_bad and not self._counts_steps:
            # The step may not increment `step`.
            num_good = max(num_good, [*were_refused, True].index(True))
        if is_bad:
            return numbers, num_good, were_refused
        self._counts_steps = num_good == len(numbers) and not skips
        return numbers, None, were_refused

    def is_finite(self, *, of_any_step: bool) -> bool:
        """Whether the state is finite, of steps that judge their gradients or of any."""
        if not (of_any_step or judges_gradients(self._step)):
            return True
        leaves, form = self._leaves, self._form
        if leaves is None:
            leaves, form = take_apart(self.state)
        return bool(_is_finite_of(form)(leaves))


# By `jax.jit`: a trace for each form of state is not a retrace that concerns a user.
@functools.lru_cache(maxsize=8)
def _is_finite_of(form: Form) -> Callable[[Leaves], Array]:
    return jax.jit(lambda leaves: is_finite_state(form.merge(leaves)))


_stacked = jax.jit(jnp.stack)


def _as_list(pending: Sequence[Pending], values: Sequence[Any]) -> list[float]:
    """The numbers of all steps: of each call one, or the first `count` of an array."""
    numbers: list[float] = []
    for call, value in zip(pending, values, strict=True):
        if np.ndim(value) == 0:
            numbers.append(float(value))
        else:
            numbers += value[: call.count].tolist()
    return numbers
