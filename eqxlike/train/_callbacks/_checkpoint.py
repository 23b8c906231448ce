"""The `Checkpoint` callback, and reading the checkpoint from which `fit` resumes."""

import functools
import math
import os
import pathlib
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

from ..._check_numbers import whole_number
from ..._traceback import stacklevel_of_user
from .._checkpoints import CheckpointError, CheckpointFolder, Saving
from .._checks import check_folder
from .._run import Run
from .._state import TrainState
from ._callback import Callback, callbacks_by_name, metric_of, mode_of, save_callbacks


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
            self._check_evaluated(run)
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
        try:
            self._under_way = self.folder.save(
                *(run.steps, run.state, data),
                score=self._score(run),
                beside=arrays,
                background=self.background,
                with_frozen=self.with_frozen,
            )
        except OSError as error:
            self._failed(error)
        else:
            self._saved_at = run.steps

    def _check_evaluated(self, run: Run) -> None:
        """Raises `ValueError` if no step with a checkpoint will be evaluated."""
        saved, evaluated = self.every, run.evaluate_every
        if evaluated is None:
            raise ValueError(
                "Checkpoint: keep_best compares metrics of evaluations: pass `evaluate` and "
                "`evaluate_every` to fit."
            )
        if saved is not None and saved <= run.num_steps < math.lcm(saved, evaluated):
            raise ValueError(
                "Checkpoint: keep_best needs an evaluation at the step of a checkpoint; got "
                f"checkpoints every {saved} steps and evaluations every {evaluated}. Make one a "
                "multiple of the other."
            )

    def _score(self, run: Run) -> float | None:
        if self.metric is None or run.evaluated_at != run.steps:
            return None
        return metric_of(run, self.metric, "Checkpoint")

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
