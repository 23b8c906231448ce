"""Where a run goes on from."""

import os
import pathlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from .._callbacks import Callback, Checkpoint, load_kept
from .._checkpoints import CheckpointError, CheckpointFolder
from .._run import Run
from .._state import TrainState


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

        def read(name: str, like: Any) -> Any:
            return self.folder.restore_beside(self.steps, name, like)

        load_kept(callbacks, run, self.kept, read)


def newest_in(
    folder: str | os.PathLike[str], like: TrainState, callbacks: Iterable[Callback]
) -> Resumed | None:
    """The newest good checkpoint in a folder; `None` where there is none.

    **Raises:** what `CheckpointFolder.restore_newest` raises, and `ValueError` for a checkpoint
    that `fit` did not make.
    """
    checkpoints = _writer_of(folder, callbacks) or CheckpointFolder(folder)
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


def _writer_of(
    folder: str | os.PathLike[str], callbacks: Iterable[Callback]
) -> CheckpointFolder | None:
    """The callback's own, if one of them writes there: it is to know which ones are damaged."""
    path = pathlib.Path(os.path.realpath(folder))
    for callback in callbacks:
        if isinstance(callback, Checkpoint) and callback.folder.folder == path:
            return callback.folder
    return None
