"""Checkpoints of a training, and where a resumed run goes on from."""

import functools
import math
import os
import pathlib
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

from ..._check_numbers import whole_number
from .._checkpoints import CheckpointError, CheckpointFolder, Saving
from .._checks import check_folder
from .._run import Run
from .._state import TrainState
from ._callback import Callback, kept_by, load_kept, metric_of


class Checkpoint(Callback):
    """Saves the state, the position in the batches and the state of callbacks.

    It saves periodically, and at the end of training, including one by Ctrl-C, SIGTERM or a
    callback. After a divergence it saves nothing: the last good state is the result of `fit`.
    `fit(..., resume_from=folder)` continues from the newest checkpoint.

    **Arguments:**

    - `folder`: where checkpoints go, each in a folder named by its step.
    - `every`: steps between two of them.
    - `keep_last`: how many of the newest ones stay.
    - `keep_best`: how many of those with the best `metric` stay too; `None` for none.
    - `metric`: its name among those of an evaluation after the same step; a checkpoint without one
      is never among the best.
    - `mode`: whether the least metric is the best, `"min"`, or the greatest, `"max"`.
    - `background`: whether a thread writes while training goes on. It needs a copy of the state in
      the memory of the host.
    - `with_frozen`: whether to save arrays that `nn.freeze` has marked. Without them a resumed run
      has those of the state that `fit` is given: see `train.save`.
    - `on_error`: what a checkpoint that cannot be written does, as where the disk is full: end the
      run with the `OSError`, `"raise"`, or only `"warn"`. The last good checkpoint stays.

    **Raises:** `ValueError` if an argument is out of range, or `keep_best` has no `metric`. When
    training starts, `ValueError` if `keep_best` is given and no checkpoint would be evaluated, and
    what `train.CheckpointFolder.check_free` raises: where the folder has checkpoints of later steps
    than the run begins with.

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
        mode: Literal["min", "max"] = "min",
        background: bool = True,
        with_frozen: bool = True,
        on_error: Literal["raise", "warn"] = "raise",
    ) -> None:
        if on_error not in ("raise", "warn"):
            raise ValueError(f'Checkpoint: on_error must be "raise" or "warn", got {on_error!r}.')
        if keep_best is not None and metric is None:
            raise ValueError("Checkpoint: keep_best needs the name of a metric: give `metric`.")
        self.every = whole_number(every, "Checkpoint: every")
        self.folder = CheckpointFolder(folder, keep_last=keep_last, keep_best=keep_best, mode=mode)
        self.keep_best, self.metric = keep_best, metric
        self.background, self.on_error = background, on_error
        self.with_frozen = with_frozen
        self._under_way: Saving | None = None
        self._saved_at = -1

    def on_start(self, run: Run) -> None:
        """Sees that the folder takes the checkpoints of this run."""
        self._under_way, self._saved_at = None, run.steps
        if self.keep_best is not None:
            self._check_evaluated(run)
        self.folder.check_free(run.steps)

    def on_step(self, run: Run) -> None:
        """Saves."""
        self._finish(run)
        self._save(run)

    def on_end(self, run: Run) -> None:
        """Saves the end, unless that is saved already, and says where."""
        self._finish(run)
        if run.divergence is None and run.steps != self._saved_at:
            # In a thread too: another Ctrl-C ends the waiting for it, and not the writing.
            self._save(run)
            self._finish(run)
        if run.checkpoint is not None and run.divergence is None:
            run.note(f"The run is saved in {run.checkpoint}.")

    def close(self) -> None:
        """Waits for what is being written."""
        self.folder.close()

    def _save(self, run: Run) -> None:
        callbacks, arrays = kept_by(run.callbacks)
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
        """Sees that checkpoints can be told apart by what is evaluated."""
        saved, evaluated = self.every, run.evaluate_every
        if evaluated is None:
            raise ValueError(
                "Checkpoint: keep_best compares what evaluations give: call fit with `evaluate` "
                "and `evaluate_every`."
            )
        if saved is not None and saved <= run.num_steps < math.lcm(saved, evaluated):
            raise ValueError(
                "Checkpoint: keep_best compares checkpoints by evaluations after the same step; "
                f"got checkpoints every {saved} steps and evaluations every {evaluated}. Make one "
                "a multiple of the other."
            )

    def _score(self, run: Run) -> float | None:
        if self.metric is None or run.evaluated_at != run.steps:
            return None
        return metric_of(run, self.metric, "Checkpoint")

    def _finish(self, run: Run) -> None:
        """Waits for the checkpoint under way, and reports it."""
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
        warnings.warn(f"A checkpoint was not written, and training goes on: {error}.", stacklevel=2)


# --- Where a run goes on from ---


class Resumed(NamedTuple):
    """What a checkpoint of `fit` holds.

    - `state`, `steps`: the state, and after how many steps of the run.
    - `position`: of the batches then; `None` if they had none.
    - `kept`: of callbacks; their arrays are in the `folder`.
    """

    state: TrainState
    steps: int
    position: Mapping[str, Any] | None
    kept: dict[str, Any]
    folder: CheckpointFolder

    def load_callbacks(self, callbacks: Sequence[Callback], run: Run) -> None:
        """Gives back to callbacks what was kept of them."""
        read = functools.partial(self.folder.restore_beside, self.steps)
        load_kept(callbacks, run, self.kept, read)


def newest_in(folder: str | os.PathLike[str], like: TrainState) -> Resumed | None:
    """The newest good checkpoint in a folder; `None` where there is none.

    **Raises:** what `CheckpointFolder.restore_newest` raises, and `ValueError` for a checkpoint
    that `fit` did not make.
    """
    check_folder(folder, "fit: resume_from")
    checkpoints = CheckpointFolder(folder)
    try:
        restored = checkpoints.restore_newest(like)
    except CheckpointError:
        raise
    except ValueError as error:
        error.add_note("Here `like` is the state that `fit` is given.")
        raise
    if restored is None:
        return None
    data = restored.data
    if not isinstance(data, dict) or not {"steps", "batches"} <= data.keys():
        raise ValueError(
            f"fit goes on from checkpoints that `train.Checkpoint` made, which say after how many "
            f"steps they are; the newest in {os.fspath(folder)} does not. Read it with "
            "`train.restore`, and give the state to `fit`."
        )
    return Resumed(
        *(restored.state, data["steps"], data["batches"]), data.get("callbacks", {}), checkpoints
    )
