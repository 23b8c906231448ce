"""Steps without their guard, and how the last good state is found again after a bad one.

A guard keeps the old arrays until the new ones are judged, so that nothing can be written in place:
this costs more than many a step. So `fit` runs the step of `make_step` without its guard, keeps a
copy of the state each time that it reads the losses, and repeats the steps since then if one was
bad.
"""

import functools
import math
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array

from ..._partition import flatten
from ..._programs import equations_in
from ..._pytree import deleted_paths, filter, is_inexact_array
from ..._transforms import JitFunction, filter_make_jaxpr
from .._guards import SMALL, has_skipped, is_kept_finite, ravel_by_dtype, unguarded
from .._state import TrainState
from ._flat_steps import Form, Leaves
from ._stack import Stack

LARGEST_STATE = 2**28
"""Bytes of a state up to which it is copied; a larger one is guarded in each step."""

LARGEST_JOINED = 2**20
"""Bytes of small arrays up to which they are copied while the copy before is still there."""

LARGEST_BATCHES = 2**26
"""Bytes of batches that are kept to be repeated; those of a call take an eighth at most."""

Call = Callable[[Leaves, Stack], tuple[Leaves, Any, Array]]
"""Makes the steps of a stack on the arrays of a state, which it takes."""


class Verdict(NamedTuple):
    """What the device knows of a state and of the steps before it.

    - `is_good`: whether all of it is finite, and it was not halted.
    - `step`: how many steps it has made.
    - `losses`: of the calls since the last read.
    - `joined`: a copy of its small arrays; `None` if they are not that small together.
    """

    is_good: bool
    step: int
    losses: list[Any]
    joined: "_Joined | None"


class Undo:
    """What is needed to go back to the state before the first bad step.

    - `step`: the step without its guard.
    """

    def __init__(self, step: JitFunction) -> None:
        self.step = step
        self._good: _Copied | None = None
        # A copy of the small arrays of a state that was found to be good.
        self._joined: _Joined | None = None
        self._kinds: tuple[_Kind, ...] = ()
        # The calls since a state was found to be good, with their batches.
        self._made: list[tuple[Call, Stack]] = []
        self._num_bytes = 0

    @classmethod
    def of(cls, step: Any, leaves: Leaves, form: Form, batches: Stack) -> "Undo | None":
        """`None` where each step keeps its guard.

        A step keeps its guard if it has no unguarded form or may not be repeated; if the optimiser
        skips updates; for arrays on several devices; and if copies would take much memory, or hold
        few trained arrays.
        """
        without_guard = unguarded(step)
        if without_guard is None or not all(isinstance(leaf, jax.Array) for leaf in leaves):
            return None
        devices = {device for leaf in leaves for device in leaf.devices()}
        num_bytes = sum(leaf.nbytes for leaf in leaves)
        state: TrainState[Any] = form.merge(leaves)
        trained = jax.tree_util.tree_leaves(filter(state.model, is_inexact_array))
        is_worth_it = (
            len(devices) == 1
            and has_skipped(state.optimiser_state) is None
            and num_bytes <= min(LARGEST_STATE, 2**20 + 8 * sum(leaf.nbytes for leaf in trained))
            and 8 * batches.nbytes <= LARGEST_BATCHES
        )
        if is_worth_it and _may_be_repeated(without_guard, state, form, batches.first):
            return cls(without_guard)
        return None

    @property
    def is_full(self) -> bool:
        """Whether the kept batches take so much memory that the losses should be read now."""
        return self._num_bytes >= LARGEST_BATCHES

    def begin(self, leaves: Leaves) -> None:
        """Keeps a copy of a good state, unless there is one since the last read."""
        if self._good is None:
            self._kinds = tuple(
                (leaf.shape, leaf.dtype, getattr(leaf, "weak_type", False)) for leaf in leaves
            )
            joined = _join(leaves) if self._joined is None else self._joined
            others = [leaf for leaf in leaves if not _is_small(leaf)]
            self._good = joined, _copy(others) if others else others
            self._joined = None

    def add(self, call: Call, batches: Stack) -> None:
        """Keeps the batches of a call."""
        self._made.append((call, batches))
        self._num_bytes += batches.nbytes

    def clear(self, joined: "_Joined | None" = None) -> None:
        """Forgets all copies: the state was found to be good, or another was set.

        `joined` is a copy of the small arrays of a good state, from its verdict.
        """
        self._good, self._joined, self._made, self._num_bytes = None, joined, [], 0

    def judge(self, leaves: Leaves, form: Form, losses: list[Any]) -> Verdict:
        """Waits for a state and the losses before it, and judges them."""
        is_stackable = len(losses) <= 256 and all(loss.ndim == 0 for loss in losses)
        stackable = losses if is_stackable else []
        # Padded to a multiple of 32, so that one program serves most calls.
        padding = stackable[-1:] * (-len(stackable) % 32)
        *found, joined = _judge_of(form)(leaves, [*stackable, *padding])
        (is_good, step), stacked = jax.device_get(found)
        numbers = [*stacked[: len(losses)]] if stackable else jax.device_get(losses)
        return Verdict(bool(is_good), int(step), numbers, joined)

    def last_good(self, form: Form) -> Leaves:
        """The arrays of the state before the first bad step; of the last one if none was bad.

        **Raises:** `RuntimeError` if the arrays of a batch were deleted.
        """
        assert self._good is not None
        good = _split(self._good, self._kinds)
        for call, batches in self._made:
            if deleted_paths(batches.first):
                raise RuntimeError(
                    "fit has to repeat steps to find the state before one that was not finite, and "
                    "the arrays of their batches were deleted, as donated ones are. Let the stream "
                    "of batches keep what it gives to fit, or copy it."
                )
            before = good
            for count in range(1, batches.count + 1):
                # By the same program, so that the numbers are the same.
                leaves, losses, _ = call(_copy(before), batches.first_ones(count))
                verdict = self.judge(leaves, form, [losses])
                if not (verdict.is_good and np.isfinite(verdict.losses[0]).flat[:count].all()):
                    return good
                good = leaves
        return good


_NOT_REPEATED = {"while", "pure_callback", "check", "backward_nan"}
"""Operations by which a step speaks to the host, or may not end."""


def _may_be_repeated(step: JitFunction, state: Any, form: Form, batch: Any) -> bool:
    """Whether a step may run again, or on a state that is bad.

    Its callbacks would run twice. A loop with a condition, or a callback, may not end well on NaN.
    """
    known = _known.setdefault(step.__wrapped__, {})
    arrays, rest = flatten(batch, by_identity=True)
    key = form, rest, tuple(map(np.shape, arrays))
    if key not in known:
        if len(known) >= 8:
            known.clear()
        jaxpr = filter_make_jaxpr(step)(state, batch)[0].jaxpr
        names = {equation.primitive.name for equation in equations_in(jaxpr)}
        known[key] = not (jaxpr.effects or names & _NOT_REPEATED)
    return known[key]


_known: weakref.WeakKeyDictionary[Any, dict[Any, bool]] = weakref.WeakKeyDictionary()


# By `jax.jit`: a trace for each form of state is not a retrace that concerns a user.
@jax.jit
def _copy(leaves: Leaves) -> Leaves:
    return [jnp.copy(leaf) for leaf in leaves]


_Joined = dict[str, Array]
"""The small arrays of a state, those of each dtype raveled into one."""

_Copied = tuple[_Joined, Leaves]
"""The small arrays of a state, and the others as they are."""


@jax.jit
def _join(leaves: Leaves) -> _Joined:
    return ravel_by_dtype(leaf for leaf in leaves if _is_small(leaf))


_Kind = tuple[tuple[int, ...], Any, bool]
"""The shape, the dtype, and whether the type is weak."""


@functools.partial(jax.jit, static_argnums=1)
def _split(copied: _Copied, kinds: tuple[_Kind, ...]) -> Leaves:
    joined, others = copied[0], iter(copied[1])
    leaves, starts = [], dict.fromkeys(joined, 0)
    for shape, dtype, is_weak in kinds:
        size, name = math.prod(shape), dtype.name
        if size > SMALL or is_weak:
            leaves.append(next(others))
            continue
        part = lax.slice(joined[name], (starts[name],), (starts[name] + size,))
        leaves.append(part.reshape(shape))
        starts[name] += size
    return leaves


def _is_small(leaf: Array) -> bool:
    # A joined array would lose its weak type, and the step be traced again for it.
    return leaf.size <= SMALL and not leaf.weak_type


@functools.lru_cache(maxsize=8)
def _judge_of(form: Form) -> Callable[[Leaves, Leaves], tuple[Array, Array | None, _Joined | None]]:
    def judge(leaves: Leaves, losses: Leaves) -> tuple[Array, Array | None, _Joined | None]:
        state: TrainState[Any] = form.merge(leaves)
        is_good = ~state.is_halted & is_kept_finite(state)
        # One array is fetched in the time of one number.
        verdict = jnp.stack([is_good.astype(state.step.dtype), state.step])
        num_bytes = sum(leaf.nbytes for leaf in leaves if _is_small(leaf))
        joined = _join(leaves) if num_bytes <= LARGEST_JOINED else None
        return verdict, jnp.stack(losses) if losses else None, joined

    return jax.jit(judge)
