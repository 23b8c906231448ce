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
"""Makes one step for each batch of a stack on the arrays of a state, which it may donate."""


class Pending(NamedTuple):
    """The losses of one call, still on the device.

    - `losses`: shape `()`, or an array whose first `count` entries are losses.
    - `were_refused`: whether each update was refused or skipped; `None` if `state.step` is known to
      count the good steps.
    - `aux`: the numbers in the aux of each step, by name.
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
    """Holds the newest state, and makes steps on it."""

    def __init__(self, state: TrainState[Model]) -> None:
        # At least one of the two is set: the state, or its arrays.
        self._state: TrainState[Model] | None = state
        self._leaves: Leaves | None = None
        self._structure = flatten_state(state)[1]
        # False for a step that changes more than arrays: it is called with the whole state.
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
        # Call and assignment are one statement, so that an interrupt leaves a consistent state.
        is_first, self._step = self._step is None, step
        if steps_per_call == 1 and not (self._takes_arrays and isinstance(step, JitFunction)):
            # The step gets the state itself: if it is not compiled, it may do anything.
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
            # It was raised while tracing, so nothing was donated.
            if steps_per_call > 1:
                raise
            self._takes_arrays = False
            return self.advance(step, batches, steps_per_call)
        except EqxlikeRuntimeError as error:
            if getattr(error, "__notes__", ()):
                # The note names arrays by their index in `leaves`, which means nothing to a user.
                error.__notes__ = [_DONATED]
            raise
        except (ValueError, jax.errors.JaxRuntimeError) as error:
            # Raised, for example, if a batch holds an array of the state. Notes name arrays by
            # their index in `leaves`: show their paths.
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
        """The arrays of the state. Drops the state; `self.state` builds it again."""
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
            # To find a NaN, JAX runs a program again with the same arguments.
            donates = not (jax.config.jax_debug_nans or jax.config.jax_debug_infs)  # pyright: ignore
            if steps_per_call == 1:
                program = single_step(rest, self._structure, donates)
                call = lambda leaves, batches: program(own, leaves, batches.first)  # noqa: E731
            else:
                # Not cached: the variables that a plain function reads may have changed since the
                # last run.
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

        **Returns:** the losses; the number of steps before the first refusal, or `None` if there
        was no refusal; and whether each update was refused or skipped.
        """
        losses, state = [calls.losses for calls in pending], self.state
        if len(losses) <= 256 and all(np.ndim(loss) == 0 for loss in losses):
            # Fetching an array takes as long as fetching one number. Padding to a multiple of 32
            # lets most calls share a compiled program.
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
        """Whether the state is finite. Without `of_any_step` it is checked only for steps that
        check their gradients but not the new state.
        """
        if not (of_any_step or checks_gradients(self._step)):
            return True
        leaves, structure = self._leaves, self._structure
        if leaves is None:
            leaves, structure = flatten_state(self.state)
        return bool(_is_finite_of(structure)(leaves))


# Not `filter_jit`: its retrace reports would show a trace for each structure of a state.
@functools.lru_cache(maxsize=8)
def _is_finite_of(structure: StateStructure) -> Callable[[Leaves], Array]:
    return jax.jit(lambda leaves: is_finite_state(structure.merge(leaves)))


_stacked = jax.jit(jnp.stack)


def _as_list(pending: Sequence[Pending], values: Sequence[Any]) -> list[float]:
    """The numbers of all steps: one for each call, or the first `count` entries of an array."""
    numbers: list[float] = []
    for call, value in zip(pending, values, strict=True):
        if np.ndim(value) == 0:
            numbers.append(float(value))
        else:
            numbers += value[: call.count].tolist()
    return numbers
