"""The training loop."""

import contextlib
import functools
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Generic, Literal, NamedTuple

import jax
import jax.numpy as jnp

from ... import tree_at
from ..._check_numbers import whole_number
from ..._interrupt import Interrupt, delayed_interrupt
from ...extend import JitFunction, deleted_paths, listed
from .._callbacks import Callback, Resumed, newest_in
from .._checks import check_callable, check_not_deleted, check_takes
from .._run import Batch, Run, Step
from .._state import Model, TrainState, check_state, copy_arrays
from ._feed import Feed
from ._schedule import EvaluateState, Schedule, checked_callbacks

StepsPerCall = int | Literal["auto"]


def fit(
    state: TrainState[Model],
    step: Step[Model, Batch],
    batches: Iterable[Batch],
    *,
    num_steps: int,
    steps_per_call: StepsPerCall = 1,
    evaluate: EvaluateState[Model] | None = None,
    evaluate_every: int | None = None,
    callbacks: Sequence[Callback] = (),
    log_every: int = 100,
    on_log: Callable[[int, float], None] | None = None,
    check_every: int = 100,
    max_skipped: int = 10,
    resume_from: str | os.PathLike[str] | None = None,
    donate: bool = False,
) -> "FitResult[Model]":
    """Runs a training step over batches.

    Steps are dispatched without waiting for their results. The host reads the losses every
    `check_every` steps. It finds a step that was not finite then, and the state is that before this
    step, however many were dispatched after it: the step of `make_step` refuses such an update, and
    all updates after it.

    The first Ctrl-C ends training after the call under way; a second one raises
    `KeyboardInterrupt`. SIGTERM, with which schedulers and containers ask a process to end, does
    the same, and then raises `SystemExit` with status 143.

    **Arguments:**

    - `state`: where to start. It is copied, and stays usable, unless `donate`.
    - `step`: `step(state, batch)` which gives `(state, loss, ...)`; see `make_step`. If a
      dict comes after the loss, logs have the means of its numbers; anything else is ignored.
    - `batches`: for example `minibatches(...)`, or a `DataLoader` of PyTorch. Tensors of other
      libraries and lists of numbers become arrays; a step that is not compiled gets its batches
      unchanged. Training ends when the batches end; see `repeat`.
    - `num_steps`: total number of steps, at least 1, including those before the run was resumed.
    - `steps_per_call`: the number of batches that are stacked, whose steps run in one call, a
      compiled loop. This makes small steps much cheaper: a call costs more than their work. The
      state is that after single steps, but for rounding. Logs, evaluations and callbacks are not
      late: a call ends where one is due. A step that is a plain function is compiled once in a run,
      with the variables that it reads as they were then. `"auto"` measures both at the beginning,
      and says what it chose in `FitResult.message`.
    - `evaluate`: `evaluate(state)` which gives metrics by name, each a number; see `make_evaluate`.
    - `evaluate_every`: steps between evaluations. The last step is followed by one anyway, also
      where the batches end before `num_steps`.
    - `callbacks`: see `Callback`.
    - `log_every`: steps between calls of `on_log`.
    - `on_log`: `on_log(step, loss)` with the steps made so far and the mean loss since the last
      log; see `progress`.
    - `check_every`: steps between two reads of the losses. The device idles for a moment at each.
    - `max_skipped`: how many updates in a row may be skipped, by a step of
      `make_step(..., check_finite="skip")` or by an optimiser such as `optax.apply_if_finite`. If
      more were skipped when the losses are read, training ends as `"diverged"`. The history
      includes the loss of a skipped step; the means in logs exclude it.
    - `resume_from`: a folder of checkpoints, as `Checkpoint` makes it. The run goes on from the
      newest good one there, with the state and the batches that came then, and ends with the same
      numbers as one that was not interrupted; it begins with `state` where there is none. A damaged
      one is warned of and left out. `batches` go to the position that was saved, if they have
      `seek`, as `minibatches` do; of others as many are passed over as there were steps.
      Callbacks get back what they kept: `EarlyStopping` goes on from its best.
    - `donate`: give the arrays of `state` to the run, one after another, so that the run and its
      caller hold one state together. The arrays are deleted, also if `fit` raises, and JAX raises
      an error where they are used. Without `donate`, `fit` keeps no reference to `state` after the
      copy, so that `fit(make_state(), ...)` holds one state too.

    **Returns:** a `FitResult`.

    **Raises:** `TypeError` if `state` is not a `TrainState`, or a callback not a `Callback`, and if
    many steps in one call cannot be what single ones are; `RuntimeError` if the arrays of the state
    were donated; `ValueError` if a number of steps is not a positive integer, or a checkpoint does
    not fit the state or the batches; `CheckpointError` if all are damaged; whatever `step`,
    `batches`, `evaluate` and callbacks raise, except that `KeyboardInterrupt` from all but the
    first ends training.

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
    check_state(state, "fit")
    check_not_deleted(state, "state", "fit")
    check_callable(step, "step(state, batch)")
    check_takes(step, "step(state, batch)", "fit")
    num_steps = whole_number(num_steps, "num_steps")
    max_skipped = whole_number(max_skipped, "max_skipped")
    checked = checked_callbacks(callbacks, on_log)
    schedule = Schedule(
        evaluate,
        checked,
        whole_number(log_every, "log_every"),
        None if evaluate_every is None else whole_number(evaluate_every, "evaluate_every"),
    )
    pace = _pace_of(steps_per_call)
    feed = Feed(batches, is_raw=steps_per_call == 1 and not isinstance(step, JitFunction))
    check_every = whole_number(check_every, "check_every")
    resumed = None if resume_from is None else newest_in(resume_from, state)
    if resumed is None:
        # The name is bound again: nobody else may hold the first state.
        state = copy_arrays(state, donate=donate)
        run = Run(_unhalted(state), num_steps, 0, max_skipped)
    else:
        for leaf in jax.tree.leaves(state) if donate else ():
            if isinstance(leaf, jax.Array):
                leaf.delete()
        run = Run(_unhalted(resumed.state), num_steps, resumed.steps, max_skipped)
        feed.seek(resumed.position, resumed.steps)
    del state
    run.evaluate_every = schedule.evaluate_every
    run.callbacks = checked
    run.on_checkpoint = functools.partial(schedule.call_hook, "on_checkpoint")
    loop = _Loop(run, step, feed, pace, schedule, check_every, resumed)
    with delayed_interrupt() as interrupt, contextlib.ExitStack() as closing:
        for callback in checked:
            closing.callback(callback.close)
        loop.run_all(interrupt)
    result = loop.result(interrupt)
    if interrupt.is_termination:
        raise interrupt.exception(f"fit: {result.message}")
    return result


Stopped = Literal["finished", "exhausted", "stopped", "interrupted", "diverged"]


class FitResult(NamedTuple, Generic[Model]):
    """The end of a training.

    - `state`: after the last good step, ready to go on from.
    - `history`: the loss of every step that this call of `fit` made, as Python floats: of none,
      where a resumed run was at its end.
    - `stopped`: the reason: all steps were made, the batches ended first, a callback stopped the
      run, Ctrl-C, or a loss or state that was not finite.
    - `message`: the same in a sentence, with the step and, for a divergence, the loss.
    - `evaluations`: the step and the metrics of each evaluation that it made.
    - `steps_per_call`: how many steps went into one call, as they were given or chosen.
    - `num_skipped`: number of steps that skipped an update that was not finite.
    """

    state: TrainState[Model]
    history: tuple[float, ...]
    stopped: Stopped
    message: str
    evaluations: tuple[tuple[int, Mapping[str, float]], ...] = ()
    steps_per_call: int = 1
    num_skipped: int = 0

    @property
    def exit_status(self) -> int:
        """The exit status for a script: 130 after Ctrl-C, 1 for a divergence or if the batches
        ended early, otherwise 0.
        """
        return {"interrupted": 130, "diverged": 1, "exhausted": 1}.get(self.stopped, 0)


class _Loop(NamedTuple):
    """A run, and all that it is run with."""

    run: Run
    step: Step
    feed: Feed
    pace: "_Pace"
    schedule: Schedule
    check_every: int
    resumed: Resumed | None

    def run_all(self, interrupt: Interrupt) -> None:
        """All steps, and the hooks of callbacks before and after."""
        run = self.run
        self.schedule.call_hook("on_start", run)
        if self.resumed is not None:
            self.resumed.load_callbacks(self.schedule.callbacks, run)
        try:
            self._run_steps(interrupt)
        except KeyboardInterrupt:
            if deleted_paths(run.state):
                # It came inside the step, after the state was given away: nothing to return.
                raise
            interrupt.is_requested = True
        run.read()
        run.position = self.feed.position
        self.schedule.call_hook("on_end", run)

    def _run_steps(self, interrupt: Interrupt) -> None:
        run, schedule, pace = self.run, self.schedule, self.pace
        while run.steps < run.num_steps and run.end is None:
            due = schedule.next_after(run)
            while run.steps < due:
                max_count = min(pace.steps_per_call, due - run.steps)
                batches = self.feed.take(pace.steps_per_call, max_count)
                if batches is None:
                    run.read()
                    if run.divergence is None:
                        schedule.at_end(run)
                    return
                advance = functools.partial(run.advance, self.step, batches, pace.steps_per_call)
                pace.run(advance, batches.count)
                is_stopping = interrupt.is_requested and not self.feed.has_mismatched_batch
                is_due = run.steps == due or run.num_unread >= self.check_every
                if is_stopping or is_due:
                    run.read()
                    if run.divergence is not None or is_stopping:
                        return
            run.position = self.feed.position
            schedule.at(run)

    def result(self, interrupt: Interrupt) -> FitResult:
        """How it ended."""
        run = self.run
        made = f"{run.steps} of {run.num_steps} steps"
        if run.steps_before:
            made += f", {run.steps_before} of them before this call"
        if run.divergence is not None:
            stopped, message = "diverged", run.divergence
        elif interrupt.is_requested:
            stopped, message = "interrupted", f"Interrupted after {made}."
        elif run.end is not None:
            stopped, message = "stopped", run.end
        elif run.steps < run.num_steps:
            stopped = "exhausted"
            message = f"Made {made}; the batches ended. Use `train.repeat(batches)` to repeat them."
        else:
            stopped, message = "finished", f"Made {made}."
        skipped = [str(run.steps - len(run.history) + index + 1) for index in run.skipped]
        where = f"step{'s' * (len(skipped) > 1)} {listed(skipped)}"
        note = f"Skipped updates that were not finite: {where}." if skipped else None
        return FitResult(
            _unhalted(run.state if run.result is None else run.result),
            tuple(run.history),
            stopped,
            " ".join(filter(None, [message, note, self.pace.message, *run.notes])),
            tuple(self.schedule.evaluations),
            self.pace.steps_per_call,
            len(skipped),
        )


def _unhalted(state: TrainState[Model]) -> TrainState[Model]:
    if not bool(state.is_halted):
        return state
    return tree_at(lambda state: state.is_halted, state, jnp.zeros_like(state.is_halted))


# --- How many steps go into one call: a number, or the faster of two that are measured ---


CHOICE = 16
CALLS = {1: 20, CHOICE: 3}
"""How many calls of one step, and of `CHOICE` steps, are timed, once each was compiled."""


class _Pace:
    """How many steps go into the next call: always the same number."""

    message = ""
    """What was found out, in a sentence."""

    def __init__(self, steps_per_call: int) -> None:
        self.steps_per_call = steps_per_call

    def run(self, advance: Callable[[], Any], num_steps: int) -> None:
        """Calls `advance`, which makes `num_steps` steps and returns arrays of the last."""
        advance()


class _MeasuredPace(_Pace):
    """Single steps at first, then many a call, and then whichever took less time for a step.

    A call that compiles does not count. Nor does the time that batches take.
    """

    def __init__(self) -> None:
        super().__init__(1)
        self._is_settled = False
        self.message = (
            f"It was too short to measure whether {CHOICE} steps a call are faster than one."
        )
        self._per_step_us: dict[int, float] = {}
        self._calls: list[tuple[int, float]] = []

    def run(self, advance: Callable[[], Any], num_steps: int) -> None:
        """Calls `advance`, and measures its time until the number is chosen."""
        if self._is_settled:
            advance()
            return
        is_last = len(self._calls) == CALLS[self.steps_per_call]
        start = time.perf_counter()
        arrays = advance()
        if is_last or not self._calls:
            # What was dispatched before is not on this call's account, nor on the next one's.
            jax.block_until_ready(arrays)
        self._calls.append((num_steps, time.perf_counter() - start))
        if is_last:
            self._settle()

    def _settle(self) -> None:
        steps, seconds = map(sum, zip(*self._calls[1:], strict=True))
        self._per_step_us[self.steps_per_call], self._calls = 1e6 * seconds / steps, []
        if self.steps_per_call == 1:
            self.steps_per_call = CHOICE
            return
        singly, many = (self._per_step_us[steps] for steps in CALLS)
        self.steps_per_call, self._is_settled = (CHOICE if many < singly else 1), True
        self.message = (
            f"Chose {self.steps_per_call} a call: a step took {singly:.1f} us by itself, and "
            f"{many:.1f} us among {CHOICE}."
        )


def _pace_of(steps_per_call: StepsPerCall) -> _Pace:
    """The pace that an argument asks for.

    **Raises:** `ValueError` for what is neither a positive integer nor `"auto"`.
    """
    if steps_per_call == "auto":
        return _MeasuredPace()
    if isinstance(steps_per_call, str):
        raise ValueError(
            f'steps_per_call must be an integer of at least 1, or "auto", got {steps_per_call!r}.'
        )
    return _Pace(whole_number(steps_per_call, "steps_per_call"))
