"""`Stepper`: calls the step of a run, and checks that its state is good."""

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
from .._guards import checks_gradients, is_finite_state, may_skip, was_refused
from .._state import Model, TrainState
from ._flat_steps import (
    Aux,
    Leaves,
    StateChanged,
    StateStructure,
    flatten_state,
    many_steps,
    read_returned,
    single_step,
)
from ._stack import Stack

Batch = TypeVar("Batch")
Step = Callable[[TrainState[Model], Batch], tuple[TrainState[Model], *tuple[Any, ...]]]
Call = Callable[[Leaves, Stack], tuple[Leaves, Any, Array, Aux]]
"""A function that makes one step for each batch of a stack. It takes and returns the arrays of a
state, and may donate them.
"""


class Pending(NamedTuple):
    """The losses of one call, which are still on the device.

    - `losses`: the loss, of shape `()`, or an array whose first `count` entries are losses.
    - `were_refused`: for each step, true if its update was refused or skipped. `None` if the flags
      are not needed, because `state.step` is known to count the good steps.
    - `aux`: the numbers in the aux of each step, by name.
    - `count`: number of steps in the call.
    """

    losses: Any
    were_refused: Array | None
    aux: Aux
    count: int


_DONATED = (
    "The state of this run was donated to the step that failed, and is deleted. The `state` passed "
    "to fit is unchanged, unless donate=True."
)


class Stepper(Generic[Model]):
    """Stores the newest state, and makes steps on it."""

    def __init__(self, state: TrainState[Model]) -> None:
        # The state and its arrays. At least one of the two is set.
        self._state: TrainState[Model] | None = state
        self._leaves: Leaves | None = None
        self._structure = flatten_state(state)[1]
        # `_takes_arrays` is False for a step that changes more than the arrays of a state. Such a
        # step is called with the whole state.
        self._takes_arrays = True
        self._step: Any = None
        self._calls: dict[int, Call] = {}
        self._counts_steps = False

    @property
    def state(self) -> TrainState[Model]:
        if self._state is None:
            assert self._leaves is not None
            state: TrainState[Model] = self._structure.merge(self._leaves)
            self._state = state
            return state
        return self._state

    @state.setter
    def state(self, state: TrainState[Model]) -> None:
        self._state, self._leaves = state, None

    def advance(self, step: Step, batches: Stack, steps_per_call: int) -> Pending:
        """Makes one step for each batch, all in one call."""
        # Below, the call of the step and the assignment of its outputs are one statement, so that
        # an interrupt leaves a consistent state.
        is_first, self._step = self._step is None, step
        if steps_per_call == 1 and not (self._takes_arrays and isinstance(step, JitFunction)):
            # The step gets the state itself, because a step that is not compiled may do anything
            # with the state.
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
            # The exception was raised while tracing, so nothing was donated.
            if steps_per_call > 1:
                raise
            self._takes_arrays = False
            return self.advance(step, batches, steps_per_call)
        except EqxlikeRuntimeError as error:
            if getattr(error, "__notes__", ()):
                # Replace the note. It names arrays by their index in `leaves`, which a user does
                # not know.
                error.__notes__ = [_DONATED]
            raise
        except (ValueError, jax.errors.JaxRuntimeError) as error:
            # JAX raises this error, for example, if a batch contains an array of the state. Notes
            # name arrays by their index in `leaves`. Replace the indices by paths.
            arrays = [
                f"state{jtu.keystr(path)}"
                for path, leaf in jtu.tree_leaves_with_path(self._structure.merge(leaves))
                if is_array(leaf)
            ]
            name = functools.partial(re.sub, r"\bleaves\[(\d+)\]", lambda at: arrays[int(at[1])])
            error.__notes__ = [*map(name, getattr(error, "__notes__", ()))]
            raise
        return Pending(losses, were_refused, aux, batches.count)

    def _opened(self) -> Leaves:
        """Returns the arrays of the state, and drops the state. `self.state` builds the state
        again.
        """
        if self._leaves is None:
            self._leaves, structure = flatten_state(self._state)
            if structure != self._structure:
                self._structure = structure
                self._calls.clear()
        self._state = None
        return self._leaves

    def _call(self, step: Step, steps_per_call: int) -> Call:
        call = self._calls.get(steps_per_call)
        if call is None:
            own, rest = flatten(step, by_identity=True)
            # Do not donate if JAX runs a program again with the same arguments to find a NaN.
            donates = not (jax.config.jax_debug_nans or jax.config.jax_debug_infs)  # pyright: ignore
            if steps_per_call == 1:
                program = single_step(rest, self._structure, donates)
                call = lambda leaves, batches: program(own, leaves, batches.first)  # noqa: E731
            else:
                # Do not use the cache of `many_steps` for a plain function, because closed-over
                # variables of the function may have changed since the last run.
                is_plain = not isinstance(step, JitFunction)
                make = many_steps.__wrapped__ if is_plain else many_steps
                call = functools.partial(make(rest, self._structure, donates, steps_per_call), own)
            self._calls[steps_per_call] = call
        return call

    def read_losses(
        self, pending: Sequence[Pending], first_step: int
    ) -> tuple[list[float], int | None, list[bool]]:
        """Waits for losses, and finds the first step that refused its update.

        **Arguments:**

        - `first_step`: `state.step` before these steps.

        **Returns:** three values. The first is a list of the losses. The second is the number of
        steps before the first refusal, or `None` if there was no refusal. The third has True for
        each step whose update was refused or skipped.
        """
        losses, state = [calls.losses for calls in pending], self.state
        if len(losses) <= 256 and all(np.ndim(loss) == 0 for loss in losses):
            # Fetch all numbers as one array, which takes as long as fetching one number. Pad it to
            # a multiple of 32, so that most calls share a compiled program.
            found = jax.device_get(_stacked([*losses, *losses[-1:] * (-len(losses) % 32)]))
            numbers = _as_list(pending, found[: len(losses)])
        else:
            numbers = _as_list(pending, jax.device_get(losses))
        were_refused = [False] * len(numbers)
        num_good, skips = int(state.step) - first_step, may_skip(state)
        # With `check_finite="skip"`, a refused step still increments `step`.
        is_bad = bool(state.is_halted) and num_good < len(numbers)
        if (is_bad or skips) and not self._counts_steps:
            flags = jax.device_get([calls.were_refused for calls in pending])
            were_refused = [*map(bool, _as_list(pending, flags))]
        if is_bad and not self._counts_steps:
            # A step that is not made by `make_step` might not increment `step`. So use the flags
            # too.
            num_good = max(num_good, [*were_refused, True].index(True))
        if is_bad:
            return numbers, num_good, were_refused
        self._counts_steps = num_good == len(numbers) and not skips
        return numbers, None, were_refused

    def is_finite(self, *, of_any_step: bool) -> bool:
        """Tests whether the state is finite.

        If `of_any_step` is false, the state is checked only if the step checks its gradients but
        not the new state. Otherwise this returns True.
        """
        if not (of_any_step or checks_gradients(self._step)):
            return True
        leaves, structure = self._leaves, self._structure
        if leaves is None:
            leaves, structure = flatten_state(self.state)
        return bool(_is_finite_of(structure)(leaves))


# This uses `jax.jit`, because retrace reports of `filter_jit` would show a trace for each
# structure.
@functools.lru_cache(maxsize=8)
def _is_finite_of(structure: StateStructure) -> Callable[[Leaves], Array]:
    return jax.jit(lambda leaves: is_finite_state(structure.merge(leaves)))


_stacked = jax.jit(jnp.stack)


def _as_list(pending: Sequence[Pending], values: Sequence[Any]) -> list[float]:
    """Converts the values of all calls to a list with one number for each step.

    The value of a call is one number, or an array whose first `count` entries are the numbers.
    """
    numbers: list[float] = []
    for call, value in zip(pending, values, strict=True):
        if np.ndim(value) == 0:
            numbers.append(float(value))
        else:
            numbers += value[: call.count].tolist()
    return numbers
