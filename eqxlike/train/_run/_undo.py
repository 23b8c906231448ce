"""Steps without their guard, and the way back to the last good state where one was bad.

To keep the old arrays until the new ones are judged costs more than many a step: nothing can be
written in place. So `fit` runs the step of `make_step` without its guard, keeps a copy of the state
each time that it looks at the losses, and repeats the steps since then where one was bad.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from ..._transforms import JitFunction
from .._state import TrainState, is_kept_finite, unguarded
from ._form import Form, Leaves
from ._stack import Stack

LARGEST_STATE = 2**28
"""Bytes of a state up to which it is copied; a larger one is guarded in each step."""

LARGEST_BATCHES = 2**26
"""Bytes of batches that are kept to be repeated; those of a call take an eighth at most."""

Call = Callable[[Leaves, Stack], tuple[Leaves, Any, Array]]
"""Makes the steps of a stack on the arrays of a state, which it takes."""


class _Made(NamedTuple):
    """Steps that were made since the state was found to be good."""

    call: Call
    batches: Stack


class Undo:
    """What is needed to go back to the state before the first bad step.

    - `step`: the step without its guard.
    """

    def __init__(self, step: JitFunction) -> None:
        self.step = step
        self._good: Leaves | None = None
        self._made: list[_Made] = []
        self._num_bytes = 0

    @classmethod
    def of(cls, step: Any, leaves: Leaves, batches: Stack) -> "Undo | None":
        """`None` where steps are to be guarded one by one.

        That is so for a step that has no other form, for arrays on several devices or on one that
        waits for the host to decide, and where copies would take much memory.
        """
        without_guard = unguarded(step)
        if without_guard is None:
            return None
        is_small = (
            sum(leaf.nbytes for leaf in leaves) <= LARGEST_STATE
            and 8 * batches.nbytes <= LARGEST_BATCHES
        )
        devices = {device for leaf in leaves for device in leaf.devices()}
        is_on_cpu = len(devices) == 1 and devices.pop().platform == "cpu"
        return cls(without_guard) if is_small and is_on_cpu else None

    @property
    def is_full(self) -> bool:
        """Whether it is time to look at the losses, and to let go of the batches."""
        return self._num_bytes >= LARGEST_BATCHES

    def begin(self, leaves: Leaves) -> None:
        """Keeps a copy of a state that is good, if it has none since the last look."""
        if self._good is None:
            self._good = _copy(leaves)

    def add(self, call: Call, batches: Stack) -> None:
        """Keeps the batches of a call."""
        self._made.append(_Made(call, batches.kept()))
        self._num_bytes += batches.nbytes

    def clear(self) -> None:
        """Forgets all: somebody has found the state to be good, or put another in its place."""
        self._good, self._made, self._num_bytes = None, [], 0

    def is_good(self, leaves: Leaves, form: Form) -> bool:
        return bool(_judge_of(form)(leaves))

    def last_good(self, form: Form) -> Leaves:
        """The arrays of the state before the first bad step; of the last one if none was bad."""
        good, made = self._good, self._made
        self.clear()
        assert good is not None
        for call, batches in made:
            before = good
            for count in range(1, batches.count + 1):
                # By the same program, so that the numbers are the same.
                leaves, losses, _ = call(_copy(before), batches.first_ones(count))
                is_finite = np.isfinite(np.atleast_1d(jax.device_get(losses))[count - 1])
                if not (is_finite and self.is_good(leaves, form)):
                    return good
                good = leaves
        return good


# By `jax.jit`: a trace for each form of state is no retrace that a user wants to hear of.
@jax.jit
def _copy(leaves: Leaves) -> Leaves:
    return [jnp.copy(leaf) for leaf in leaves]


@functools.lru_cache(maxsize=8)
def _judge_of(form: Form) -> Callable[[Leaves], Array]:
    def judge(leaves: Leaves) -> Array:
        state: TrainState[Any] = form.merge(leaves)
        return ~state.is_halted & is_kept_finite(state)

    return jax.jit(judge)
