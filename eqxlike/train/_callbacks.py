"""`Callback`, the base class of callbacks; early stopping; checkpoints and resumed runs."""

import collections
import functools
import math
import os
import pathlib
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from jaxtyping import PyTree

from .._check_numbers import whole_number
from .._traceback import stacklevel_of_user
from ._checkpoints import CheckpointFolder
from ._checks import check_folder
from ._orbax import CheckpointError, Saving
from ._run import Run
from ._state import TrainState, copy_arrays


class Callback:
    """Base class of callbacks. `fit` calls the hooks of a callback at events of a training run.

    Derive a class and override hooks. Each hook gets a `train.Run`. `fit` calls the hooks of its
    `callbacks` in order. An exception in a hook ends `fit`.

    - `every`: number of steps between two calls of `on_step`; `None` for no calls.

    >>> import jax, jax.numpy as jnp, optax
    >>> from eqxlike import nn, train
    >>> class StopBelow(train.Callback):
    ...     def __init__(self, loss):
    ...         self.loss = loss
    ...     def on_log(self, run):
    ...         if run.loss < self.loss:
    ...             run.stop(f"The loss was below {self.loss} after step {run.steps}.")
    >>> optimiser = optax.sgd(0.1)
    >>> state = train.TrainState.create(
    ...     nn.Linear(2, 1, key=jax.random.key(0)), optimiser, key=jax.random.key(1)
    ... )
    >>> step = train.make_step(lambda model, x, key: jnp.mean(jax.vmap(model)(x) ** 2), optimiser)
    >>> result = train.fit(
    ...     state, step, [jnp.ones((4, 2))] * 99, num_steps=99, log_every=5,
    ...     callbacks=[StopBelow(0.1)],
    ... )
    >>> result.stopped
    'stopped'

    To restore a callback's own state in a resumed run, override `save_state` and `load_state`, or
    `save_arrays` and `load_arrays` for arrays:

    >>> class CountLogs(train.Callback):
    ...     def on_start(self, run):
    ...         self.count = 0
    ...     def on_log(self, run):
    ...         self.count += 1
    ...     def save_state(self):
    ...         return {"count": self.count}
    ...     def load_state(self, run, state):
    ...         self.count = state["count"]
    """

    every: int | None = None

    def on_start(self, run: Run) -> None:
        """Called before the first step."""

    def on_log(self, run: Run) -> None:
        """Called every `log_every` steps, and after the last step. `run.loss` is the mean loss
        since the previous log.
        """

    def on_evaluate(self, run: Run) -> None:
        """Called after an evaluation, with its metrics in `run.metrics`."""

    def on_step(self, run: Run) -> None:
        """Called every `every` steps, after the logs and evaluations of that step."""

    def on_checkpoint(self, run: Run) -> None:
        """Called after a checkpoint was written. `run.checkpoint` is its folder.

        If a checkpoint is written in the background, this hook is called when the next checkpoint
        is due, or at the end of the run.
        """

    def on_end(self, run: Run) -> None:
        """Called after the last step, unless an exception ended the run."""

    @property
    def state_name(self) -> str:
        """The name of this callback's state in a checkpoint. If several callbacks have the same
        name, a resumed run matches them by their order.
        """
        return type(self).__qualname__

    def save_state(self) -> Any:
        """Returns the state to save in a checkpoint, or `None` if there is no state. The state must
        be made of JSON values: bools, numbers, strings, lists and dicts.
        """
        return None

    def load_state(self, run: Run, state: Any) -> None:
        """Called in a resumed run after `on_start`, with the value that `save_state` returned."""

    def save_arrays(self) -> PyTree:
        """Returns a pytree of arrays to save in a checkpoint; `None` for no arrays."""
        return None

    def load_arrays(self, run: Run, read: Callable[[PyTree], PyTree]) -> None:
        """Called after `load_state` if arrays were saved. `read(like)` returns the saved arrays.
        `like` is a pytree with the structure that was saved; see `train.restore`.
        """

    def close(self) -> None:
        """Called at the very end, even after an exception. Close files here."""


def metric_of(run: Run, metric: str, taker: str) -> float:
    """A metric of the last evaluation. **Raises:** `KeyError` if the metric is missing."""
    if metric not in run.metrics:
        raise KeyError(
            f"{taker} needs the metric {metric!r}, but `evaluate` returned "
            f"{', '.join(map(repr, run.metrics)) or 'none'}."
        )
    return run.metrics[metric]


def mode_of(mode: str | None, metric: str, taker: str) -> Any:
    """Returns `mode`, or `"min"` for a loss without a mode. **Raises:** `ValueError` if unclear."""
    if mode is None and "loss" in metric:
        return "min"
    if mode not in ("min", "max"):
        raise ValueError(
            f'{taker}: pass mode="max" if a larger {metric!r} is better, or mode="min" if a '
            f"smaller one is; got mode={mode!r}."
        )
    return mode


# --- The state of callbacks in checkpoints ---


def save_callbacks(callbacks: Sequence[Callback]) -> tuple[dict[str, Any], dict[str, PyTree]]:
    """Two dicts with names of callbacks as keys: the states as JSON values, and the arrays."""
    data, arrays = {}, {}
    for name, callback in callbacks_by_name(callbacks).items():
        state, own = callback.save_state(), callback.save_arrays()
        if own is not None:
            arrays[name] = own
        if state is not None or own is not None:
            data[name] = {"state": state, "has_arrays": own is not None}
    return data, arrays


def callbacks_by_name(callbacks: Sequence[Callback]) -> dict[str, Callback]:
    """The callbacks by name. The second callback with the same name gets the suffix ` #2`, and so
    on.
    """
    named: dict[str, Callback] = {}
    counts: collections.Counter[str] = collections.Counter()
    for callback in callbacks:
        name = callback.state_name
        counts[name] += 1
        named[name if counts[name] == 1 else f"{name} #{counts[name]}"] = callback
    return named


class EarlyStopping(Callback):
    """Ends training when a metric stops improving, and returns the best state.

    **Arguments:**

    - `metric`: name of a metric that `evaluate` returns.
    - `patience`: training ends after this many evaluations in a row without an improvement.
    - `mode`: `"min"` if the smallest metric is the best, `"max"` if the largest is. Only a metric
      with `loss` in its name has a default, `"min"`.
    - `min_delta`: an improvement counts only if the metric improves by more than this number.
    - `restore_best`: whether `fit` returns the best state instead of the last state. `True` keeps a
      copy of the best state in memory.

    A metric that is NaN counts as no improvement. If the first metric is NaN, there is a warning.

    Checkpoints save the best state too. A resumed run ends at the same step as an uninterrupted
    run. If early stopping had already ended the run, the resumed run ends at once.

    **Raises:** `ValueError` if `mode` is missing or unknown, if `patience` is not a
    positive integer, or if `min_delta` is negative. When training starts, `ValueError` if `fit` has
    no evaluations. `KeyError` at the first evaluation that does not return the metric.

    >>> from eqxlike import train
    >>> callback = train.EarlyStopping("accuracy", patience=3, mode="max")
    """

    def __init__(
        self,
        metric: str,
        *,
        patience: int = 5,
        mode: Literal["min", "max"] | None = None,
        min_delta: float = 0.0,
        restore_best: bool = True,
    ) -> None:
        if not min_delta >= 0:
            raise ValueError(f"EarlyStopping: min_delta must be at least 0, got {min_delta!r}.")
        self.metric, self.min_delta = metric, min_delta
        self.mode = mode_of(mode, metric, "EarlyStopping")
        self.patience = whole_number(patience, "EarlyStopping: patience")
        self.restore_best = restore_best
        self._reset()

    def _reset(self) -> None:
        self.best = math.nan
        self.best_step = 0
        self._best_state: Any = None
        self._num_worse = 0

    def on_start(self, run: Run) -> None:
        """Resets the callback."""
        if run.evaluate_every is None:
            raise ValueError(
                "EarlyStopping needs evaluations: pass `evaluate` and `evaluate_every` to fit."
            )
        self._reset()

    def on_evaluate(self, run: Run) -> None:
        """Compares the metric with the best metric so far."""
        value = metric_of(run, self.metric, "EarlyStopping")
        gain = self.best - value if self.mode == "min" else value - self.best
        is_first = math.isnan(self.best) and not math.isnan(value)
        if is_first or gain > self.min_delta:
            self.best, self.best_step, self._num_worse = value, run.steps, 0
            if self.restore_best:
                self._best_state = copy_arrays(run.state)
            return
        self._num_worse += 1
        if math.isnan(value) and math.isnan(self.best) and self._num_worse == 1:
            warnings.warn(
                f"EarlyStopping: {self.metric} is NaN after step {run.steps}, which counts as no "
                f"improvement; {self.patience} evaluations in a row without improvement end the "
                "run. Check that `evaluate` has at least one example and does not divide by zero.",
                stacklevel=stacklevel_of_user(),
            )
        self._stop_if_due(run)

    def _stop_if_due(self, run: Run) -> None:
        if self._num_worse >= self.patience:
            best = f"did not improve on {self.best:.6g}, at step {self.best_step},"
            what = "was NaN" if math.isnan(self.best) else best
            run.stop(
                f"Stopped after step {run.steps}: {self.metric} {what} in {self.patience} "
                "evaluations."
            )

    def on_end(self, run: Run) -> None:
        """Sets the result to the best state."""
        if self._best_state is not None and self.best_step != run.steps:
            run.result = self._best_state
            run.note(f"The state is the best one, after step {self.best_step}.")

    @property
    def state_name(self) -> str:
        """The name contains the metric and the mode. So a resumed run with another metric does not
        use the saved state.
        """
        return f"EarlyStopping({self.metric!r}, mode={self.mode!r})"

    def save_state(self) -> dict[str, Any]:
        """The best metric, its step, and the number of evaluations since that step."""
        return {
            "best": None if math.isnan(self.best) else self.best,
            "best_step": self.best_step,
            "num_worse": self._num_worse,
            "has_best_state": self._best_state is not None,
        }

    def load_state(self, run: Run, state: dict[str, Any]) -> None:
        """Restores the best metric. Ends the run if early stopping had already ended it.

        **Raises:** `ValueError` if `restore_best` is set but the checkpoint has no best state.
        """
        if self.restore_best and state["best"] is not None and not state["has_best_state"]:
            raise ValueError(
                "EarlyStopping: the resumed run had restore_best=False and did not save its best "
                f"state, of step {state['best_step']}: pass restore_best=False here too."
            )
        self.best = math.nan if state["best"] is None else state["best"]
        self.best_step, self._num_worse = state["best_step"], state["num_worse"]
        self._stop_if_due(run)

    def save_arrays(self) -> Any:
        """The best state."""
        return self._best_state

    def load_arrays(self, run: Run, read: Callable[[Any], Any]) -> None:
        """Reads the best state."""
        if self.restore_best:
            self._best_state = read(run.state)

    def close(self) -> None:
        """Frees the best state."""
        self._best_state = None


class Checkpoint(Callback):
    """Saves the state, the position in the batches and the state of callbacks.

    The callback saves periodically and at the end of training, even if Ctrl-C, SIGTERM or a
    callback ends the training. After a divergence the callback does not save, but `fit` returns the
    last good state. `fit(..., resume_from=folder)` continues from the newest checkpoint.

    **Arguments:**

    - `folder`: the folder of the checkpoints. Each checkpoint is a subfolder with its step in the
      name.
    - `every`: number of steps between checkpoints.
    - `keep_last`: number of newest checkpoints to keep.
    - `keep_best`: number of checkpoints with the best `metric` to keep in addition to the newest.
      `None` keeps only the newest.
    - `metric`: name of a metric. Only checkpoints of steps that were evaluated can be among the
      best.
    - `mode`: `"min"` if the smallest metric is the best, `"max"` if the largest is. Only a metric
      with `loss` in its name has a default, `"min"`.
    - `background`: whether to write in a thread while training continues. `True` copies the state
      to the memory of the host.
    - `with_frozen`: whether to save arrays that `nn.freeze` has marked. If `False`, a resumed run
      takes these arrays from the state passed to `fit`; see `train.save`.
    - `on_error`: what happens if a checkpoint cannot be written, for example on a full disk.
      `"raise"` ends the run with the `OSError`, and `"warn"` continues the run with a warning.
      Earlier checkpoints stay.

    **Raises:** `ValueError` if an argument is out of range, or if `keep_best` is set without a
    `metric`. When training starts, `ValueError` if `keep_best` is set and no saved step would be
    evaluated, or if the folder has a checkpoint of a later step than the step at which the run
    starts.

    >>> import tempfile
    >>> from eqxlike import train
    >>> callback = train.Checkpoint(tempfile.mkdtemp(), every=1000, keep_last=2)
    """

    every: int

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        every: int,
        keep_last: int = 3,
        keep_best: int | None = None,
        metric: str | None = None,
        mode: Literal["min", "max"] | None = None,
        background: bool = True,
        with_frozen: bool = True,
        on_error: Literal["raise", "warn"] = "raise",
    ) -> None:
        if on_error not in ("raise", "warn"):
            raise ValueError(f'Checkpoint: on_error must be "raise" or "warn", got {on_error!r}.')
        if keep_best is not None:
            if metric is None:
                raise ValueError("Checkpoint: keep_best needs a metric to compare: pass `metric`.")
            mode = mode_of(mode, metric, "Checkpoint")
        self.every = whole_number(every, "Checkpoint: every")
        self.folder = CheckpointFolder(
            folder, keep_last=keep_last, keep_best=keep_best, mode=mode or "min"
        )
        self.keep_best, self.metric = keep_best, metric
        self.background, self.on_error = background, on_error
        self.with_frozen = with_frozen
        self._under_way: Saving | None = None
        self._saved_at = -1

    def on_start(self, run: Run) -> None:
        """Checks that the checkpoints of this run can be written to the folder."""
        self._under_way, self._saved_at = None, run.steps
        if self.keep_best is not None:
            if run.evaluate_every is None:
                raise ValueError(
                    "Checkpoint: keep_best compares metrics of evaluations: pass `evaluate` and "
                    "`evaluate_every` to fit."
                )
            if self.every <= run.num_steps < math.lcm(self.every, run.evaluate_every):
                raise ValueError(
                    "Checkpoint: keep_best needs an evaluation at the step of a checkpoint; got "
                    f"checkpoints every {self.every} steps and evaluations every "
                    f"{run.evaluate_every}. Make one a multiple of the other."
                )
        self.folder.check_free(run.steps)

    def on_step(self, run: Run) -> None:
        """Saves a checkpoint."""
        self._finish(run)
        self._save(run)

    def on_end(self, run: Run) -> None:
        """Saves the last state unless it is already saved. Adds the folder to the message of the
        run.
        """
        self._finish(run)
        if run.divergence is None and run.steps != self._saved_at:
            # With `background=True`, this state too is written in a thread. So a second Ctrl-C
            # interrupts the wait for the thread, and not the writing.
            self._save(run)
            self._finish(run)
        if run.checkpoint is not None and run.divergence is None:
            run.note(f"The run is saved in {run.checkpoint}.")

    def close(self) -> None:
        """Waits for the checkpoint that is being written."""
        self.folder.close()

    def _save(self, run: Run) -> None:
        callbacks, arrays = save_callbacks(run.callbacks)
        data = {"steps": run.steps, "batches": run.position, "callbacks": callbacks}
        score = None
        if self.metric is not None and run.evaluated_at == run.steps:
            score = metric_of(run, self.metric, "Checkpoint")
        try:
            self._under_way = self.folder.save(
                *(run.steps, run.state, data),
                score=score,
                beside=arrays,
                background=self.background,
                with_frozen=self.with_frozen,
            )
        except OSError as error:
            self._failed(error)
        else:
            self._saved_at = run.steps

    def _finish(self, run: Run) -> None:
        """Waits for the checkpoint that is being written, and reports it to the callbacks."""
        saving, self._under_way = self._under_way, None
        if saving is None:
            return
        try:
            saving.wait()
        except OSError as error:
            self._saved_at = -1
            self._failed(error)
        else:
            run.tell_checkpoint(pathlib.Path(saving.path))

    def _failed(self, error: OSError) -> None:
        if self.on_error == "raise":
            raise error
        warnings.warn(f"A checkpoint was not written, training continues: {error}.", stacklevel=2)


# --- The checkpoint from which a run resumes ---


class Resumed(NamedTuple):
    """The contents of a checkpoint that `Checkpoint` wrote.

    - `state`: the state of the run.
    - `steps`: number of steps that the run had made.
    - `position`: the position of the batches; `None` if the batches had no position.
    - `callback_states`: states of callbacks by name. The arrays of callbacks are read from the
      `folder` later.
    """

    state: TrainState
    steps: int
    position: Mapping[str, Any] | None
    callback_states: dict[str, Any]
    folder: CheckpointFolder

    def load_callbacks(self, callbacks: Sequence[Callback], run: Run) -> None:
        """Restores the states and arrays of callbacks, which are matched by name."""
        for name, callback in callbacks_by_name(callbacks).items():
            saved = self.callback_states.get(name)
            if saved is None:
                continue
            if saved["state"] is not None:
                callback.load_state(run, saved["state"])
            if saved["has_arrays"]:
                read = functools.partial(self.folder.restore_beside, self.steps, name)
                callback.load_arrays(run, read)


def newest_in(
    folder: str | os.PathLike[str], like: TrainState, callbacks: Sequence[Callback]
) -> Resumed | None:
    """The newest undamaged checkpoint in a folder; `None` if there is no checkpoint.

    Warns if there is no checkpoint, and no `Checkpoint` among `callbacks` will write to the folder.
    The name of the folder may then be wrong.

    **Raises:** the errors of `CheckpointFolder.restore_newest`. `ValueError` if the checkpoint was
    not written by `Checkpoint`.
    """
    check_folder(folder, "fit: resume_from")
    checkpoints = CheckpointFolder(folder)
    try:
        restored = checkpoints.restore_newest(like)
    except CheckpointError:
        raise
    except ValueError as error:
        error.add_note("`like` is the state passed to `fit`.")
        raise
    if restored is None:
        written = [each.folder.folder for each in callbacks if isinstance(each, Checkpoint)]
        if checkpoints.folder not in written:
            warnings.warn(
                f"fit found no checkpoint in resume_from={os.fspath(folder)!r}, so the run starts "
                "with the state that you passed.",
                stacklevel=stacklevel_of_user(),
            )
        return None
    data = restored.data
    if not isinstance(data, dict) or not {"steps", "batches"} <= data.keys():
        raise ValueError(
            "fit resumes only from checkpoints that `train.Checkpoint` wrote, and the newest in "
            f"{os.fspath(folder)} is not one of them. Read it with `train.restore`, and pass the "
            "state to `fit`."
        )
    return Resumed(
        *(restored.state, data["steps"], data["batches"]), data.get("callbacks", {}), checkpoints
    )
