"""`Run`: the newest state of a training run, the calls of its step, and the losses read so far.

One or many steps per call are compiled as functions of the state's arrays. A call with a
`TrainState` would flatten the state and build a new state each time. Between two calls nobody needs
the `TrainState`, so its arrays are passed from one call to the next as a list.

The file begins with these lists and with the compiled functions. `Run` follows them.
"""

import collections
import functools
import itertools
import math
import pathlib
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import jax.random as jr
import jax.tree_util as jtu
import numpy as np
import optax
from jax import lax
from jax.extend.core import jaxpr_as_fun
from jaxtyping import Array, Bool, Int32, PyTree

from .. import (
    EqxlikeRuntimeError,
    combine,
    filter_jit,
    is_array,
    is_array_like,
    partition,
    tree_pformat,
)
from .._dtypes import is_key
from ..extend import (
    JitFunction,
    Structure,
    are_concrete_arrays,
    find_difference,
    find_static_difference,
    flatten,
    listed,
    paths_without_numbers,
    same_shape_and_dtype,
)
from ._batch_iterator import Stack, stack_device_arrays
from ._checks import check_not_deleted
from ._guards import checks_gradients, is_finite_state, may_skip, was_refused
from ._state import Model, TrainState, check_state

# --- A state as a list of plain arrays and a hashable structure ---


Leaves = list[Array]
Aux = dict[str, Array]
"""The numbers in the auxiliary output of a loss, by name."""


class StateStructure(NamedTuple):
    """The structure of a state. States of equal structure share a compiled program.

    - `structure`: the state without its arrays.
    - `impls`: for each array, the implementation of the PRNG key, or `None` if it is not a key.
      Keys are passed as arrays of bits. This is faster, because JAX builds a Python object for each
      array of keys that a call returns.
    """

    structure: Structure
    impls: tuple[Any, ...]

    def merge(self, leaves: Leaves) -> Any:
        """Builds the state from its arrays."""
        arrays = tuple(
            leaf if impl is None else jr.wrap_key_data(leaf, impl=impl)
            for leaf, impl in zip(leaves, self.impls, strict=True)
        )
        return self.structure.rebuilder(cache=are_concrete_arrays(arrays))(arrays)


def flatten_state(state: Any) -> tuple[Leaves, StateStructure]:
    """The arrays of a state, where keys are arrays of bits, and the structure of the state."""
    leaves, structure = flatten(state, by_identity=True)
    impls = tuple(jr.key_impl(leaf) if is_key(leaf) else None for leaf in leaves)
    plain = [
        leaf if impl is None else jr.key_data(leaf)
        for leaf, impl in zip(leaves, impls, strict=True)
    ]
    return plain, StateStructure(structure, impls)


class StateChanged(TypeError):
    """Raised if a step returns a state that differs from the old state in more than its arrays."""


# --- One or many steps, compiled as a function of these arrays ---


# Cached, so that the next run with the same step reuses the compiled program.
@functools.lru_cache(maxsize=8)
def single_step(
    step: Structure, state_structure: StateStructure, donates: bool
) -> Callable[[Leaves, Leaves, Any], tuple[Leaves, Any, Bool[Array, ""], Aux]]:
    """Compiles a step as a function of the arrays of a state.

    **Arguments:**

    - `step`, `state_structure`: structures of the step and of the state.
    - `donates`: whether the arrays of the state are donated.

    **Returns:** a function of the step's arrays, the state's arrays, and a batch. It returns four
    values: the new arrays of the state, the loss, a boolean that is true if the update was refused
    or skipped, and the aux. It raises `StateChanged` if the structure of the state changes.
    """

    def single(own: Leaves, leaves: Leaves, batch: Any) -> tuple[Leaves, Any, Array, Aux]:
        state = state_structure.merge(leaves)
        run = step.rebuilder(cache=False)(tuple(own))
        # With `jax_debug_nans`, JAX runs the program again, operation by operation, to find a NaN.
        # The second run needs the arguments, so the first must not donate them.
        new, loss, aux = read_returned((run if donates else run.__wrapped__)(state, batch))
        return _leaves_of(new, state, state_structure), loss, was_refused(new), aux

    return filter_jit(single, donate=("leaves",) if donates else ())


@functools.lru_cache(maxsize=8)
def many_steps(
    step: Structure, state_structure: StateStructure, donates: bool, steps_per_call: int
) -> Callable[[Leaves, Leaves, Stack], tuple[Leaves, Array, Array, Aux]]:
    """Compiles a loop over up to `steps_per_call` compatible batches, with one step for each batch.

    **Arguments:**

    - `step`, `state_structure`, `donates`: see `single_step`.

    **Returns:** a function of the step's arrays, the state's arrays, and batches. It returns four
    values: the new arrays of the state, the losses, booleans that are true if an update was refused
    or skipped, and the aux. The last three are arrays of shape `(steps_per_call,)`; ignore entries
    beyond the number of batches. The function raises `StateChanged` if the structure of the state
    changes, and `TypeError` if a shape or dtype of the state changes.
    """

    def many(
        own: Leaves, leaves: Leaves, batches: PyTree, count: Int32[Array, ""] | np.int32
    ) -> tuple[Leaves, Array, Array, Aux]:
        arrays, others = partition(stack_device_arrays(batches), is_array)

        def one(leaves: Leaves, index: Array) -> tuple[Leaves, Array, tuple[Array, Array, Aux]]:
            batch = jtu.tree_map(
                lambda each: lax.dynamic_index_in_dim(each, index, 0, False), arrays
            )
            state = state_structure.merge(leaves)
            run = step.rebuilder(cache=False)(tuple(own))
            new, loss, aux = read_returned(run(state, combine(batch, others)))
            leaves = _leaves_of(new, state, state_structure)
            if difference := find_difference(state, new, same_shape_and_dtype):
                explained = difference.explain("state", "the next state")
                raise TypeError(
                    "With steps_per_call above 1, a step must keep the shapes and dtypes of "
                    f"arrays: {explained}. Pass `steps_per_call=1`."
                )
            # With `check_finite="skip"`, a refused step still increments `step`, and the loop must
            # continue.
            is_halted = new.is_halted & (new.step == state.step)
            return leaves, is_halted, (jnp.asarray(loss), was_refused(new), aux)

        # The trace is needed to know the structure of the aux. The loop runs the traced program, so
        # that the step is traced only once.
        first = jnp.zeros_like(count)
        traced, shapes = jax.make_jaxpr(one, return_shape=True)(leaves, first)
        run_one, treedef = jaxpr_as_fun(traced), jtu.tree_structure(shapes)

        def is_unfinished(carry: Any) -> Array:
            index, _, is_halted, _ = carry
            # Stop at a halted state, because further steps would not change it.
            return (index < count) & ~is_halted

        def body(carry: Any) -> Any:
            index, leaves, _, results = carry
            leaves, is_halted, found = treedef.unflatten(run_one(*leaves, index))
            results = jtu.tree_map(
                lambda row, each: row.at[index].set(jnp.asarray(each).astype(row.dtype)),
                results,
                found,
            )
            return index + 1, leaves, is_halted, results

        # The widest float dtype can hold losses of any dtype.
        wide = jax.dtypes.canonicalize_dtype(float)
        rows = jtu.tree_map(
            lambda each: jnp.zeros(steps_per_call, bool if each.dtype == bool else wide), shapes[2]
        )
        # The count is an argument. So the same program can make fewer steps, when the batches end
        # or a log is due.
        carry = first, leaves, jnp.zeros((), bool), rows
        _, leaves, _, (losses, were_refused, aux) = lax.while_loop(is_unfinished, body, carry)
        return leaves, losses, were_refused, aux

    compiled = filter_jit(many, donate=("leaves",) if donates else ())

    def call(own: Leaves, leaves: Leaves, batches: Stack) -> tuple[Leaves, Array, Array, Aux]:
        return compiled(own, leaves, batches.whole(), np.int32(batches.count))

    return call


def read_returned(returned: Any) -> tuple[TrainState, Any, Aux]:
    """Reads the output of a step.

    **Returns:** the state, the loss, and the aux. If the step returns a dict after the loss, the
    aux has copies of the real numbers in this dict. Otherwise the aux is empty.

    **Raises:** `TypeError` if the output does not start with a state and a loss.
    """
    match returned:
        case [TrainState() as state, loss, *others]:
            kinds = jnp.floating, jnp.integer
            is_real = is_array(loss) and any(jnp.issubdtype(loss.dtype, kind) for kind in kinds)
            if not isinstance(loss, int | float) and not (is_real and loss.shape == ()):
                raise TypeError(
                    "fit expected the step to return a real number of shape () as loss, got "
                    f"{tree_pformat(loss)}."
                )
            aux = others[0] if others and isinstance(others[0], Mapping) else {}
            # Copy the numbers, because an entry may be an array of the state, and the next step
            # overwrites the state.
            numbers = {
                name: value
                for name, value in aux.items()
                if is_array_like(value)
                and jnp.shape(value) == ()
                and not (is_key(value) or jnp.iscomplexobj(value))
            }
            return state, loss, jtu.tree_map(jnp.copy, numbers)
    raise TypeError(
        "fit expected the step to return `(state, loss)`, with the next TrainState, like a step of "
        f"make_step; got {tree_pformat(returned)}."
    )


def _leaves_of(state: Any, before: Any, state_structure: StateStructure) -> Leaves:
    leaves, structure = flatten_state(state)
    if structure != state_structure:
        difference = find_static_difference(before, state)
        explained = "" if difference is None else difference.explain("the state", "the next one")
        raise StateChanged(
            "With steps_per_call above 1, a step may change only the arrays of a state: "
            f"{explained}. Pass `steps_per_call=1`."
        )
    return leaves


# --- The run ---


Batch = TypeVar("Batch")
Step = Callable[[TrainState[Model], Batch], tuple[TrainState[Model], *tuple[Any, ...]]]
_Call = Callable[[Leaves, Stack], tuple[Leaves, Any, Array, Aux]]
"""A function that makes one step for each batch of a stack. It takes and returns the arrays of a
state, and may donate them.
"""


class _Pending(NamedTuple):
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
        # The state and its arrays. At least one of the two is set.
        self._state: TrainState[Model] | None = state
        self._leaves: Leaves | None = None
        self._structure = flatten_state(state)[1]
        # `_takes_arrays` is False for a step that changes more than the arrays of a state. Such a
        # step is called with the whole state.
        self._takes_arrays = True
        self._step: Any = None
        self._calls: dict[int, _Call] = {}
        # True if `state.step` is known to count the good steps.
        self._counts_steps = False
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
        self._pending: list[_Pending] = []
        self.num_unread = 0
        self._num_logged = 0

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
        check_state(state, "run.state")
        check_not_deleted(state, "state", "run.state")
        self._state, self._leaves = state, None
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
        self.call_hook("on_checkpoint")

    # --- Methods that only `fit` calls ---

    def call_hook(self, hook: str) -> None:
        """Calls a hook of every callback."""
        for callback in self.callbacks:
            getattr(callback, hook)(self)

    def advance(self, step: Step, batches: Stack, steps_per_call: int) -> Any:
        """Makes one step for each batch. Returns an array that is ready after the last step."""
        # Below, the call of the step and the assignment of its outputs are one statement, so that
        # an interrupt leaves a consistent state.
        is_first, self._step = self._step is None, step
        if steps_per_call == 1 and not (self._takes_arrays and isinstance(step, JitFunction)):
            # The step gets the state itself, because a step that is not compiled may do anything
            # with the state.
            self._state, self._leaves = self.state, None
            self._state, losses, aux = read_returned(step(self._state, batches.first))
            were_refused = None if self._counts_steps else was_refused(self._state)
        else:
            if is_first and (paths := paths_without_numbers(batches.first, "batch")):
                raise TypeError(f"fit expected batches of numbers; got {listed(paths)}.")
            leaves = self._take_leaves()
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
                    # Replace the note. It names arrays by their index in `leaves`, which a user
                    # does not know.
                    error.__notes__ = [_DONATED]
                raise
            except (ValueError, jax.errors.JaxRuntimeError) as error:
                # JAX raises this error, for example, if a batch contains an array of the state.
                # Notes name arrays by their index in `leaves`. Replace the indices by paths.
                arrays = [
                    f"state{jtu.keystr(path)}"
                    for path, leaf in jtu.tree_leaves_with_path(self._structure.merge(leaves))
                    if is_array(leaf)
                ]
                name = functools.partial(
                    re.sub, r"\bleaves\[(\d+)\]", lambda at: arrays[int(at[1])]
                )
                error.__notes__ = [*map(name, getattr(error, "__notes__", ()))]
                raise
        self._pending.append(_Pending(losses, were_refused, aux, batches.count))
        self.num_unread += batches.count
        self.steps += batches.count
        return losses

    def _take_leaves(self) -> Leaves:
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

    def _call(self, step: Step, steps_per_call: int) -> _Call:
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

    def read(self) -> None:
        """Waits for the losses on the device. Sets `divergence` if a step was bad, that is, if its
        loss or its update was not finite.

        If the bad step refused its update, `state` is the state before the bad step.
        """
        if not self._pending:
            return
        pending, state = self._pending, self.state
        losses = _as_list(pending, _fetched([calls.losses for calls in pending]))
        rows = jax.device_get([calls.aux for calls in pending])
        were_skipped = [False] * len(losses)
        num_good, skips = int(state.step) - self._good_step, may_skip(state)
        # With `check_finite="skip"`, a refused step still increments `step`.
        is_kept = bool(state.is_halted) and num_good < len(losses)
        if (is_kept or skips) and not self._counts_steps:
            flags = jax.device_get([calls.were_refused for calls in pending])
            were_skipped = [*map(bool, _as_list(pending, flags))]
            # A step that is not made by `make_step` might not increment `step`. So use the flags
            # too.
            num_good = max(num_good, [*were_skipped, True].index(True))
        if not is_kept:
            self._counts_steps = num_good == len(losses) and not skips
            # Steps may have no check, so a loss that is not finite also shows a bad step.
            are_bad = [
                not math.isfinite(loss) and not was_skipped
                for loss, was_skipped in zip(losses, were_skipped, strict=True)
            ]
            num_good = [*are_bad, True].index(True)
        # Clear the list only now, so that no losses are lost if Ctrl-C interrupts the wait.
        self._pending, self.num_unread = [], 0
        before = len(self.history)
        self.skipped += [before + place for place in range(num_good) if were_skipped[place]]
        self.history += losses[:num_good]
        steps = iter(were_skipped[:num_good])
        for calls, row in zip(pending, rows, strict=True):
            are_kept = [not was_skipped for was_skipped in itertools.islice(steps, calls.count)]
            for name, values in row.items():
                kept = itertools.compress(np.ravel(values).tolist(), are_kept)
                self._aux_since_log.setdefault(name, []).extend(kept)
        self.steps -= len(losses) - num_good
        # After an interrupt, the loss of the last good step may be missing.
        if num_good < len(losses):
            self.divergence = self._describe(losses[num_good], is_kept)
        elif checks_gradients(self._step) and not self._is_finite():
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

    def _is_finite(self) -> bool:
        leaves, structure = self._leaves, self._structure
        if leaves is None:
            leaves, structure = flatten_state(self.state)
        return bool(_is_finite_of(structure)(leaves))

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
        if not self._is_finite():
            return f"{what}. {_not_finite(f'after step {step - 1}')}"
        return f"{what}; the state is the one after step {step - 1}."


def _not_finite(when: str) -> str:
    return (
        f"The state {when} is not finite, although its gradients were: the optimiser made a "
        "parameter or an array of its own state NaN or infinite. A step of `make_step(..., "
        'check_finite="state")` keeps the state before such an update.'
    )


# This uses `jax.jit`, because retrace reports of `filter_jit` would show a trace for each
# structure.
@functools.lru_cache(maxsize=8)
def _is_finite_of(structure: StateStructure) -> Callable[[Leaves], Array]:
    return jax.jit(lambda leaves: is_finite_state(structure.merge(leaves)))


_stacked = jax.jit(jnp.stack)


def _fetched(losses: list[Any]) -> list[Any]:
    """Fetches the losses of all calls from the device."""
    if len(losses) > 256 or any(np.ndim(loss) for loss in losses):
        return jax.device_get(losses)
    # Fetch all numbers as one array, which takes as long as fetching one number. Pad it to a
    # multiple of 32, so that most calls share a compiled program.
    found = jax.device_get(_stacked([*losses, *losses[-1:] * (-len(losses) % 32)]))
    return found[: len(losses)]


def _as_list(pending: Sequence[_Pending], values: Sequence[Any]) -> list[float]:
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
