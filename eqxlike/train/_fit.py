"""`fit`: the training loop, and the schedule of logs, evaluations and callbacks."""

import contextlib
import functools
import os
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Generic, Literal, NamedTuple

import jax
import jax.numpy as jnp

from .. import tree_at, tree_pformat
from .._check_numbers import hint_to_call, whole_number
from .._runs import Interrupt, delayed_interrupt
from .._traceback import stacklevel_of_user
from ..extend import JitFunction, deleted_paths, listed
from ._batch_iterator import BatchIterator
from ._callbacks import Callback, newest_in
from ._checks import check_callable, check_not_deleted, check_takes
from ._run import Batch, Run, Step
from ._state import Model, TrainState, check_state, copy_arrays

EvaluateState = Callable[[TrainState[Model]], Mapping[str, Any]]
"""A function that takes a state and returns metrics by name."""
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
    `check_every` steps. Only then does the host see whether a loss or an update was not finite. The
    state is still the last good state, because a step of `make_step` refuses an update that is not
    finite, and refuses all later updates too.

    The first Ctrl-C ends training after the current call. A second Ctrl-C raises
    `KeyboardInterrupt`. SIGTERM, the signal with which schedulers and containers end a process,
    also ends training after the current call. `fit` then raises `SystemExit` with status 143.

    **Arguments:**

    - `state`: the initial state. It is copied and stays usable, unless `donate=True`.
    - `step`: a function `step(state, batch)` that returns `(state, loss, ...)`; see `make_step`. If
      the third output is a dict, logs show the means of its numbers. Other outputs are ignored.
    - `batches`: an iterable, for example `minibatches(...)` or a PyTorch `DataLoader`. Tensors of
      other libraries and lists of numbers become arrays. But if the step is not compiled, it gets
      the batches unchanged. Training ends when the batches end; see `repeat`.
    - `num_steps`: number of steps, at least 1. With `resume_from`, the steps of the earlier run
      count too. For several epochs, pass the number of epochs times the batches of an epoch.
    - `steps_per_call`: number of steps in one call. A call is a compiled loop over stacked batches.
      If steps are small, several steps per call are much cheaper, because the overhead of a call
      exceeds the work of a step. The state is the same as after single steps, up to rounding. Logs,
      evaluations and callbacks are not delayed, because a call ends early when one of them is due.
      With several steps per call, `fit` compiles a step that is a plain function, once per run. The
      compiled step keeps the values that the function's closed-over variables have at that time.
      `"auto"` measures the time of 1 and of 16 steps per call at the beginning, uses the faster,
      and reports it in `FitResult.message`.
    - `evaluate`: a function `evaluate(state)` that returns metrics by name. Each metric is a
      number. See `make_evaluate`.
    - `evaluate_every`: number of steps between evaluations. The state after the last step is always
      evaluated, even if the batches end before `num_steps`.
    - `callbacks`: see `Callback`.
    - `log_every`: number of steps between logs. At a log, `on_log` and the hooks `on_log` of
      callbacks are called.
    - `on_log`: a function that is called as `on_log(step, loss)`. `step` is the number of steps so
      far, and `loss` is the mean loss since the last log. See `progress`.
    - `check_every`: number of steps between two reads of the losses. The device idles briefly at
      each read.
    - `max_skipped`: maximum number of updates in a row that may be skipped. Updates that are not
      finite are skipped by a step of `make_step(..., check_finite="skip")`, or by an optimiser such
      as `optax.apply_if_finite`. If `fit` finds more skipped updates when it reads the losses,
      training ends as `"diverged"`. The history includes the loss of a skipped step, but the means
      in logs do not.
    - `resume_from`: a folder of checkpoints that `Checkpoint` wrote. The run continues from the
      newest checkpoint that is not damaged, and computes the same numbers as an uninterrupted run.
      A warning reports damaged checkpoints. If there is no checkpoint, the run starts with `state`,
      and warns unless a `Checkpoint` in `callbacks` writes to this folder.
      If `batches` have a method `seek`, as `minibatches` do, `fit` calls it with the saved
      position. Otherwise one batch is skipped for each step of the earlier run. Callbacks get their
      saved state back; for example, `EarlyStopping` knows the best metric of the earlier run.
    - `donate`: whether to move the arrays of `state` into the run one by one, so that memory never
      has two states. The arrays of `state` are deleted, even if `fit` raises an error. JAX raises
      an error if you use a deleted array. With `donate=False`, `state` is copied, and `fit` keeps
      no reference to the original. So `fit(make_state(), ...)` has only one state in memory after
      the copy.

    **Returns:** a `FitResult`.

    **Raises:**

    - `TypeError` if `state` is not a `TrainState`, if a callback is not a `Callback`, or if the
      step cannot run several times in one call.
    - `RuntimeError` if arrays of `state` were donated.
    - `ValueError` if an argument such as `num_steps` is not a positive integer, or if a checkpoint
      does not fit the state or the batches.
    - `CheckpointError` if all checkpoints are damaged.
    - Any exception that `step`, `batches`, `evaluate` or a callback raises, except that a
      `KeyboardInterrupt` in `batches`, `evaluate` or a callback ends training.

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
    check_takes(step, "step(state, batch)", "fit")
    num_steps = whole_number(num_steps, "num_steps")
    max_skipped = whole_number(max_skipped, "max_skipped")
    checked = _checked_callbacks(callbacks, on_log)
    schedule = _Schedule(
        evaluate,
        checked,
        whole_number(log_every, "log_every"),
        None if evaluate_every is None else whole_number(evaluate_every, "evaluate_every"),
    )
    call_size = _CallSize(steps_per_call)
    iterator = BatchIterator(
        batches, is_raw=steps_per_call == 1 and not isinstance(step, JitFunction)
    )
    check_every = whole_number(check_every, "check_every")
    resumed = None if resume_from is None else newest_in(resume_from, state, checked)
    if resumed is None:
        # Assign to the same name, so that there is no reference to the caller's state.
        state = copy_arrays(state, donate=donate)
        run = Run(_unhalted(state), num_steps, 0, max_skipped)
    else:
        for leaf in jax.tree.leaves(state) if donate else ():
            if isinstance(leaf, jax.Array):
                leaf.delete()
        run = Run(_unhalted(resumed.state), num_steps, resumed.steps, max_skipped)
        iterator.seek(resumed.position, resumed.steps)
    del state
    run.evaluate_every = schedule.evaluate_every
    run.callbacks = checked
    with delayed_interrupt() as interrupt, contextlib.ExitStack() as closing:
        for callback in checked:
            closing.callback(callback.close)
        run.call_hook("on_start")
        if resumed is not None:
            resumed.load_callbacks(checked, run)
        try:
            _run_steps(run, step, iterator, call_size, schedule, check_every, interrupt)
        except KeyboardInterrupt:
            if deleted_paths(run.state):
                # The interrupt came inside the step, after the state was donated. So there is no
                # state to return.
                raise
            interrupt.is_requested = True
        run.read()
        run.position = iterator.position
        run.call_hook("on_end")
    result = _result_of(run, schedule, call_size, interrupt.is_requested)
    if interrupt.is_termination:
        raise interrupt.exception(f"fit: {result.message}")
    return result


Stopped = Literal["finished", "exhausted", "stopped", "interrupted", "diverged"]


class FitResult(NamedTuple, Generic[Model]):
    """The result of `fit`.

    - `state`: the state after the last good step; training can continue from it.
    - `history`: the loss of each step that this call of `fit` made, as Python floats. It is empty
      if the resumed run was already finished.
    - `stopped`: why the run ended.
        - `"finished"`: all steps were made.
        - `"exhausted"`: the batches ended first.
        - `"stopped"`: a callback stopped the run.
        - `"interrupted"`: Ctrl-C or SIGTERM interrupted the run.
        - `"diverged"`: a loss or state was not finite.
    - `message`: the reason in words, with the step. After a divergence it also has the loss.
    - `evaluations`: for each evaluation in this call of `fit`, the step and the metrics.
    - `steps_per_call`: number of steps in one call, as passed to `fit` or as chosen by `"auto"`.
    - `num_skipped`: number of steps whose update was not finite and was skipped.
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
        """The exit status for a script. It is 130 after Ctrl-C, 1 after a divergence or if the
        batches ended early, otherwise 0.
        """
        return {"interrupted": 130, "diverged": 1, "exhausted": 1}.get(self.stopped, 0)


def _run_steps(
    run: Run,
    step: Step,
    iterator: BatchIterator,
    call_size: "_CallSize",
    schedule: "_Schedule",
    check_every: int,
    interrupt: Interrupt,
) -> None:
    """Makes steps until the run ends, the batches end, or the user interrupts."""
    while run.steps < run.num_steps and run.end is None:
        due = schedule.next_after(run)
        while run.steps < due:
            steps_per_call = call_size.steps_per_call
            batches = iterator.take(steps_per_call, min(steps_per_call, due - run.steps))
            if batches is None:
                run.read()
                if run.divergence is None and run.steps > run.steps_before:
                    schedule.observe(run, logs=True, evaluates=True)
                return
            advance = functools.partial(run.advance, step, batches, steps_per_call)
            call_size.run(advance, batches.count)
            is_stopping = interrupt.is_requested and not iterator.has_mismatched_batch
            if is_stopping or run.steps == due or run.num_unread >= check_every:
                run.read()
                if run.divergence is not None or is_stopping:
                    return
        run.position = iterator.position
        schedule.at(run)


def _result_of(
    run: Run, schedule: "_Schedule", call_size: "_CallSize", is_interrupted: bool
) -> FitResult:
    made = f"{run.steps} of {run.num_steps} steps"
    if run.steps_before:
        made += f", {run.steps_before} of them before this call"
    if run.divergence is not None:
        stopped, message = "diverged", run.divergence
    elif is_interrupted:
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
        " ".join(filter(None, [message, note, call_size.message, *run.notes])),
        tuple(schedule.evaluations),
        call_size.steps_per_call,
        len(skipped),
    )


def _unhalted(state: TrainState[Model]) -> TrainState[Model]:
    if not bool(state.is_halted):
        return state
    return tree_at(lambda state: state.is_halted, state, jnp.zeros_like(state.is_halted))


# --- The number of steps in one call: fixed, or the faster of two ---


CHOICE = 16
"""With `"auto"`, a call has this number of steps, or one."""
CALLS = {1: 20, CHOICE: 3}
"""Maps the number of steps per call to the number of calls that are timed after compilation."""


class _CallSize:
    """The number of steps in the next call. With `"auto"` it is 1 or `CHOICE`, whichever is faster;
    otherwise it is fixed.

    When training starts with `"auto"`, first calls of one step are timed, then calls of `CHOICE`
    steps. Calls that compile are not timed, and the time to make batches does not count. `message`
    describes the result.
    """

    def __init__(self, steps_per_call: StepsPerCall) -> None:
        self.message = ""
        self._is_settled = steps_per_call != "auto"
        if steps_per_call == "auto":
            self.steps_per_call = 1
            self.message = (
                f"The run was too short to measure whether {CHOICE} steps per call are faster than "
                "one."
            )
        elif isinstance(steps_per_call, str):
            raise ValueError(
                'steps_per_call must be an integer of at least 1, or "auto", got '
                f"{steps_per_call!r}."
            )
        else:
            self.steps_per_call = whole_number(steps_per_call, "steps_per_call")
        self._per_step_us: dict[int, float] = {}
        self._calls: list[tuple[int, float]] = []

    def run(self, advance: Callable[[], Any], num_steps: int) -> None:
        """Calls `advance`. Measures the time of this call if the number of steps is not chosen yet.

        `advance` makes `num_steps` steps and returns arrays of the last step.
        """
        if self._is_settled:
            advance()
            return
        is_last = len(self._calls) == CALLS[self.steps_per_call]
        start = time.perf_counter()
        arrays = advance()
        if is_last or not self._calls:
            # Wait for the first call, which is not timed, so that the timed calls do not include
            # its work. Wait for the last call, so that the timed calls include all their own work.
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
            f"Chose steps_per_call={self.steps_per_call}: a step took {singly:.1f} us in calls of "
            f"one, and {many:.1f} us in calls of {CHOICE}."
        )


# --- The steps after which logs, evaluations and callbacks are due ---


class _Schedule:
    """Decides after which steps logs, evaluations and callbacks are due, and runs them."""

    def __init__(
        self,
        evaluate: EvaluateState | None,
        callbacks: tuple[Callback, ...],
        log_every: int,
        evaluate_every: int | None,
    ) -> None:
        if evaluate is not None:
            hint = " Pass the function that `make_evaluate(measure, batches)` returns."
            check_takes(evaluate, "evaluate(state)", "fit", hint)
        elif evaluate_every is not None:
            raise ValueError(
                f"fit got evaluate_every={evaluate_every} but no `evaluate`: pass `evaluate`, for "
                "example from `make_evaluate`."
            )
        self._evaluate = evaluate
        self.log_every = log_every if callbacks else None
        self.evaluate_every = evaluate_every
        periods = [self.log_every, self.evaluate_every, *(each.every for each in callbacks)]
        self._periods = [period for period in periods if period is not None]
        self.evaluations: list[tuple[int, Mapping[str, float]]] = []
        self._logged_at = -1

    def next_after(self, run: Run) -> int:
        """The next step after which a log, an evaluation or a callback is due, or the last step."""
        steps = run.steps
        return min([run.num_steps, *(steps - steps % each + each for each in self._periods)])

    def at(self, run: Run) -> None:
        """Logs, evaluates and calls `on_step`, if they are due after the current step.

        Read the losses before you call this.
        """

        def is_due(every: int | None) -> bool:
            return every is not None and run.steps % every == 0

        is_last = run.steps >= run.num_steps
        logs, evaluates = is_due(self.log_every), is_due(self.evaluate_every)
        self.observe(run, is_last or logs, is_last or evaluates)
        for callback in run.callbacks:
            if is_due(callback.every):
                callback.on_step(run)

    def observe(self, run: Run, logs: bool, evaluates: bool) -> None:
        """Evaluates and logs, at most once per step. It evaluates first, so that the log can show
        the metrics.
        """
        is_log_due = logs and self.log_every is not None and self._logged_at != run.steps
        if is_log_due:
            self._logged_at = run.steps
            run.log()
        if evaluates and self._evaluate is not None and run.evaluated_at != run.steps:
            run.evaluated_at = run.steps
            run.metrics = _as_numbers(self._evaluate(run.state))
            self.evaluations.append((run.steps, run.metrics))
            run.call_hook("on_evaluate")
        if is_log_due:
            run.call_hook("on_log")


def _as_numbers(metrics: Any) -> dict[str, float]:
    """Converts the output of `evaluate` to floats. Raises `TypeError` if that is impossible."""
    if not isinstance(metrics, Mapping):
        raise TypeError(
            f"fit expected `evaluate` to return a mapping from names to numbers, got {metrics!r}."
        )
    numbers = {}
    for name, value in metrics.items():
        try:
            numbers[name] = float(value)
        except (TypeError, ValueError) as error:
            raise TypeError(
                f"fit expected `evaluate` to return a number for {name!r}, got "
                f"{tree_pformat(value)}."
            ) from error
    return numbers


# --- The callbacks that the user passed ---


class _OnLog(Callback):
    """A callback that calls the function that the user passed to `fit` as `on_log`."""

    def __init__(self, function: Callable[[int, float], None]) -> None:
        self.function = function

    def on_log(self, run: Run) -> None:
        self.function(run.steps, run.loss)


def _checked_callbacks(
    callbacks: Sequence[Callback], on_log: Callable[[int, float], None] | None
) -> tuple[Callback, ...]:
    """Checks the callbacks. Converts `on_log` to a callback and appends it.

    **Raises:** `TypeError` if a callback is not a `Callback`, or if `on_log` is not callable.
    `ValueError` if the attribute `every` of a callback is not a positive integer.
    """
    if isinstance(callbacks, Callback):
        raise TypeError(f"fit expected a list of callbacks, got {callbacks!r}: put it in a list.")
    if on_log is not None:
        check_callable(on_log, "on_log(step, loss)", "fit")
    for index, callback in enumerate(callbacks):
        if not isinstance(callback, Callback):
            raise TypeError(
                f"fit expected a train.Callback at callbacks[{index}], got {callback!r}"
                f"{hint_to_call(callback)}."
            )
        if callback.every is not None:
            whole_number(callback.every, f"callbacks[{index}].every")
        elif type(callback).on_step is not Callback.on_step:
            warnings.warn(
                f"callbacks[{index}] has an `on_step` that is never called: set its attribute "
                "`every` to the number of steps between two calls.",
                stacklevel=stacklevel_of_user(),
            )
    return (*callbacks, *([] if on_log is None else [_OnLog(on_log)]))
