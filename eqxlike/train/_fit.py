"""The training loop."""

import math
from collections.abc import Callable, Iterable
from typing import Any, Generic, Literal, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array

from .._interrupt import Interrupt, delayed_interrupt
from .._numbers import whole_number
from .._pytree import deleted_paths, tree_at
from ._checks import check_not_deleted, check_state
from ._state import Model, TrainState, copy_arrays

Batch = TypeVar("Batch")
Step = Callable[[TrainState[Model], Batch], tuple[TrainState[Model], *tuple[Any, ...]]]


class FitResult(NamedTuple, Generic[Model]):
    """The end of a training.

    - `state`: after the last good step, ready to go on from.
    - `history`: the loss of every step that was made, as Python floats.
    - `stopped`: why: all steps were made, Ctrl-C, or a loss or state that was not finite.
    - `message`: the same in a sentence, with the step and, for a divergence, the loss.
    """

    state: TrainState[Model]
    history: tuple[float, ...]
    stopped: Literal["finished", "interrupted", "diverged"]
    message: str


class _Run:
    """The newest state, the losses read so far, and those still on the device."""

    def __init__(self, state: TrainState):
        self.state = state
        self.first_step = int(state.step)
        self.history: list[float] = []
        # Each loss comes with whether the state was halted then, until it is known that the step
        # adds one to `state.step`, which says by itself how many steps were good.
        self.pending: list[tuple[Array, Array | None]] = []
        self.counts_steps = False
        self.divergence: str | None = None

    @property
    def count(self) -> int:
        """Calls of the step so far."""
        return len(self.history) + len(self.pending)

    def advance(self, step: Step, batch: Any) -> None:
        # One statement: whatever interrupts it, `state` is one that no call has been given.
        self.state, loss, *_ = step(self.state, batch)
        # A copy: the next step may donate it.
        is_halted = None if self.counts_steps else jnp.copy(self.state.is_halted)
        self.pending.append((loss, is_halted))

    def read(self) -> None:
        """Waits for the losses on the device; says in `divergence` if a step of theirs was bad."""
        if not self.pending:
            return
        pending, self.pending = jax.device_get(self.pending), []
        losses = [float(loss) for loss, _ in pending]
        num_counted = int(self.state.step) - self.first_step - len(self.history)
        if bool(self.state.is_halted):
            were_halted = [bool(is_halted) for _, is_halted in pending]
            num_good = num_counted if self.counts_steps else [*were_halted, True].index(True)
            self.history += losses[:num_good]
            # A step that was interrupted may have no loss.
            if num_good < len(losses):
                self.divergence = self._describe(losses[num_good])
            return
        self.counts_steps = num_counted == len(losses)
        for loss in losses:
            if not math.isfinite(loss):
                self.divergence = (
                    f"The loss was {loss} in step {self._failed_step}. The step did not keep its "
                    "last good state: make it with `make_step(..., check_finite=True)`, or call "
                    "`keep_if_finite` in it."
                )
                return
            self.history.append(loss)

    @property
    def _failed_step(self) -> int:
        return self.first_step + len(self.history) + 1

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


def fit(
    state: TrainState[Model],
    step: Step[Model, Batch],
    batches: Iterable[Batch],
    *,
    num_steps: int,
    log_every: int = 100,
    on_log: Callable[[int, float], None] | None = None,
    check_every: int = 25,
) -> FitResult[Model]:
    """Runs a training step over batches.

    Steps are dispatched without waiting for their results. The host reads losses every
    `check_every` steps; a step that was not finite is found then, and since `make_step` refuses
    such an update on the device, the state is that before it, however many steps were dispatched
    after.

    The first Ctrl-C ends training after the step under way; a second one raises
    `KeyboardInterrupt`.

    **Arguments:**

    - `state`: where to start. It is copied, and stays usable.
    - `step`: `step(state, batch)` which gives `(state, loss, ...)`; see `make_step`.
    - `batches`: for example `minibatches(...)`. If they end early, so does training.
    - `num_steps`: how many steps to make, at least 1.
    - `log_every`: steps between calls of `on_log`.
    - `on_log`: `on_log(step, loss)` with the steps made in this call and the mean loss since the
      last log; see `progress`.
    - `check_every`: steps between looks at the losses. The device idles for a moment at each.

    **Returns:** a `FitResult`.

    **Raises:** `TypeError` if `state` is no `TrainState`; `RuntimeError` if its arrays were
    donated; `ValueError` if `num_steps`, `log_every` or `check_every` is not a positive integer;
    whatever `step`, `batches` and `on_log` raise, except that `KeyboardInterrupt` from the last two
    ends training.

    >>> import jax, jax.numpy as jnp, optax
    >>> from eqxlike import nn, train
    >>> optimiser = optax.sgd(0.1)
    >>> state = train.TrainState.create(
    ...     nn.Linear(2, 1, key=jax.random.key(0)), optimiser, key=jax.random.key(1)
    ... )
    >>> step = train.make_step(lambda model, x, key: jnp.mean(jax.vmap(model)(x) ** 2), optimiser)
    >>> result = fit(state, step, [jnp.ones((4, 2))] * 10, num_steps=10)
    >>> result.stopped, len(result.history), result.history[-1] < result.history[0]
    ('finished', 10, True)
    """
    check_state(state, TrainState, "fit")
    check_not_deleted(state, "state", "fit")
    num_steps = whole_number(num_steps, "num_steps")
    log_every = whole_number(log_every, "log_every")
    check_every = whole_number(check_every, "check_every")
    run = _Run(_unhalted(copy_arrays(state)))
    with delayed_interrupt() as interrupt:
        try:
            _loop(run, step, batches, num_steps, log_every, on_log, check_every, interrupt)
        except KeyboardInterrupt:
            if deleted_paths(run.state):
                # It came inside the step, after the state was given away: nothing to return.
                raise
            interrupt.is_requested = True
        run.read()
    return _result(run, interrupt, num_steps)


def _loop(
    run: _Run,
    step: Step,
    batches: Iterable[Any],
    num_steps: int,
    log_every: int,
    on_log: Callable[[int, float], None] | None,
    check_every: int,
    interrupt: Interrupt,
) -> None:
    logged = 0
    for batch in batches:
        run.advance(step, batch)
        is_last = run.count == num_steps
        is_log = on_log is not None and (is_last or run.count % log_every == 0)
        if is_log or is_last or interrupt.is_requested or run.count % check_every == 0:
            run.read()
            if run.divergence is not None or interrupt.is_requested:
                return
            if on_log is not None and is_log:
                recent = run.history[logged:]
                logged = len(run.history)
                on_log(run.count, math.fsum(recent) / len(recent))
        if is_last:
            return


def _unhalted(state: TrainState[Model]) -> TrainState[Model]:
    return tree_at(lambda state: state.is_halted, state, jnp.zeros((), bool))


def _result(run: _Run, interrupt: Interrupt, num_steps: int) -> FitResult:
    state, made = _unhalted(run.state), len(run.history)
    if run.divergence is not None:
        return FitResult(state, tuple(run.history), "diverged", run.divergence)
    if interrupt.is_requested:
        message = f"Interrupted after {made} of {num_steps} steps."
        return FitResult(state, tuple(run.history), "interrupted", message)
    message = f"Made {made} of {num_steps} steps" + (
        "." if made == num_steps else "; the batches ended."
    )
    return FitResult(state, tuple(run.history), "finished", message)
