"""A folder of checkpoints of one run: the newest, the best, and what to go on from."""

import contextlib
import itertools
import math
import os
import pathlib
import shutil
import socket
import warnings
import weakref
from collections.abc import Mapping
from typing import Any, Literal, TypeVar

from jaxtyping import PyTree

from ..._check_numbers import integer, whole_number
from .._checks import check_folder
from ._background import Saving, in_first, lock, wait_for_newest
from ._format import NAME, CheckpointError, name_of, read_manifest, steps_in
from ._restore import Only, Restored, read_one
from ._save import write_checkpoint

State = TypeVar("State")


class CheckpointFolder:
    """A folder with the checkpoints of one run, each named by its step.

    One process at a time writes there, from its first `save` until `close`, or its end; any number
    may read.

    **Arguments:**

    - `folder`: made at the first `save`, if it is not there.
    - `keep_last`: how many of the newest checkpoints stay, at least one.
    - `keep_best`: how many of those with the best scores stay too; `None` for none.
    - `mode`: whether the best score is the smallest, `"min"`, or the largest, `"max"`.

    **Raises:** `ValueError` if an argument is out of range, or the folder is itself a checkpoint.

    >>> import tempfile, jax.numpy as jnp
    >>> with CheckpointFolder(tempfile.mkdtemp(), keep_last=2) as checkpoints:
    ...     for step in (10, 20, 30):
    ...         _ = checkpoints.save(step, {"weight": jnp.full(2, step)})
    >>> [path.name for path in checkpoints.paths()]
    ['step_000000030', 'step_000000020']
    >>> checkpoints.restore_newest({"weight": jnp.zeros(2, int)}).state
    {'weight': Array([30, 30], dtype=int32)}
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        keep_last: int = 3,
        keep_best: int | None = None,
        mode: Literal["min", "max"] = "min",
    ) -> None:
        check_folder(folder, "CheckpointFolder: folder")
        self.folder = pathlib.Path(os.path.realpath(folder))
        if (self.folder / NAME).exists():
            raise ValueError(
                f"CheckpointFolder expected a folder of checkpoints, and {self.folder} is one "
                f"itself: give {self.folder.parent}."
            )
        self.keep_last = whole_number(keep_last, "CheckpointFolder: keep_last")
        self.keep_best = (
            0 if keep_best is None else whole_number(keep_best, "CheckpointFolder: keep_best")
        )
        if mode not in ("min", "max"):
            raise ValueError(f'CheckpointFolder expected mode "min" or "max", and got {mode!r}.')
        self.mode = mode
        # Releases the lock, at the latest when nobody has this object any more.
        self._unlock: weakref.finalize | None = None
        self._damaged: set[pathlib.Path] = set()

    def __enter__(self) -> "CheckpointFolder":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Waits for what is being written, and lets another process write here."""
        wait_for_newest()
        if self._unlock is not None:
            self._unlock()
            self._unlock = None

    def save(
        self,
        step: int,
        state: PyTree,
        data: Any = None,
        *,
        score: float | None = None,
        beside: Mapping[str, PyTree] | None = None,
        background: bool = False,
        with_frozen: bool = True,
    ) -> Saving:
        """Writes a checkpoint, and once it is in its place deletes those that need not stay.

        **Arguments:**

        - `step`: which it is of. A checkpoint of the same step is replaced.
        - `state`, `data`, `background`, `with_frozen`: as of `train.save`.
        - `score`: for `keep_best`. One that is not finite is never among the best.
        - `beside`: other pytrees by name, kept along as `state` is; see `restore_beside`.

        **Returns:** as `train.save`.

        **Raises:** as `train.save`, and what is here stays; also `BlockingIOError` if another
        process writes here, and `ValueError` if the folder has a checkpoint of a later step.
        """
        self.check_free(step)
        path = self._path_of(step)
        return write_checkpoint(
            path,
            state,
            data,
            background=background,
            with_frozen=with_frozen,
            score=None if score is None else float(score),
            beside=beside,
            then=lambda: in_first(lambda: self._prune(path)),
        )

    def check_free(self, step: int) -> None:
        """Raises, before a run, what `save` of this step would raise because of what is here."""
        self._path_of(step)
        in_first(lambda: self._begin(step))

    def _path_of(self, step: int) -> pathlib.Path:
        number = integer(step)
        if number is None:
            raise TypeError(
                "CheckpointFolder expected the number of a step, an integer, and then the state; "
                f"got an object of type {type(step).__name__}."
            )
        if number < 0:
            raise ValueError(f"A step is counted from 0, got {number}.")
        return self.folder / name_of(number)

    def paths(self) -> list[pathlib.Path]:
        """The checkpoints, newest first, whole or damaged."""
        return list(steps_in(self.folder).values())

    def newest(self) -> pathlib.Path | None:
        """The newest checkpoint, whole or damaged; `None` if there is none."""
        wait_for_newest()
        return next(iter(self.paths()), None)

    def best(self) -> pathlib.Path | None:
        """The checkpoint with the best score, of equal ones the newest; `None` if none has one.

        >>> import tempfile, jax.numpy as jnp
        >>> from eqxlike import train
        >>> with CheckpointFolder(tempfile.mkdtemp(), keep_best=1, mode="max") as checkpoints:
        ...     for step, accuracy in ((10, 0.7), (20, 0.9), (30, 0.8)):
        ...         _ = checkpoints.save(step, {"weight": jnp.full(2, step)}, score=accuracy)
        >>> train.restore(checkpoints.best(), {"weight": jnp.zeros(2, int)}).state
        {'weight': Array([20, 20], dtype=int32)}
        """
        wait_for_newest()
        return next(iter(self._ranked(self.paths())), None)

    def restore_newest(self, like: State, *, only: Only = None) -> Restored[State] | None:
        """The newest checkpoint that is not damaged, with a warning for each that is.

        **Arguments:**

        - `like`, `only`: as in `train.restore`.

        **Returns:** as `train.restore`; `None` where there is no checkpoint.

        **Raises:** `CheckpointError` if all are damaged; another `ValueError` if the newest whole
        one does not fit `like`; older ones are not tried, since they would hardly fit.
        """
        wait_for_newest()
        damages: list[str] = []
        for path in self.paths():
            try:
                restored = read_one(path, like, only=only)
            except CheckpointError as error:
                damages.append(str(error))
                self._damaged.add(path)
                continue
            except FileNotFoundError:
                # The process that writes here has deleted it meanwhile.
                continue
            for damage in damages:
                warnings.warn(f"{damage} Going on from {path}, which is older.", stacklevel=2)
            return restored
        if damages:
            raise CheckpointError(
                f"None of the {len(damages)} checkpoints in {self.folder} is whole: "
                f"{' '.join(damages)}"
            )
        return None

    def restore_beside(self, step: int, name: str, like: State) -> State:
        """A pytree that was saved with the state of a step.

        **Arguments:**

        - `step`, `name`: which.
        - `like`: as of `train.restore`.

        **Raises:** as `train.restore`; `KeyError` if none of that name was saved along.
        """
        wait_for_newest()
        return read_one(self._path_of(step), like, name).state

    def _begin(self, step: int) -> None:
        """Locks the folder, deletes what was left half-made, and checks that `step` is newest."""
        # A save of our own that is under way is not left half-made.
        wait_for_newest()
        self._lock_folder()
        for path in self.folder.glob(".step_*"):
            if path.name.endswith((".tmp", ".old")):
                # One in which somebody is working is locked, and stays.
                with contextlib.suppress(OSError):
                    descriptor = lock(path, "in use", path)
                    shutil.rmtree(path, ignore_errors=True)
                    os.close(descriptor)
        for later, path in steps_in(self.folder).items():
            if later <= step:
                break
            if path not in self._damaged:
                raise ValueError(
                    f"{self.folder} has a checkpoint of step {later}, and one of step {step} is to "
                    f"be saved, which would not be the newest. Go on from {path}, or give another "
                    "folder."
                )
            # Damaged checkpoints are kept, under another name.
            names = (path.with_name(f"{path.name}.damaged{n or ''}") for n in itertools.count())
            os.rename(path, next(name for name in names if not name.exists()))

    def _lock_folder(self) -> None:
        if self._unlock is not None:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / ".lock"
        path.touch()
        owner = path.read_text() or "unnamed"
        busy = f"somebody else writes checkpoints here, {owner}: end it, or give another folder"
        self._unlock = weakref.finalize(self, os.close, lock(path, busy, self.folder))
        path.write_text(f"process {os.getpid()} on {socket.gethostname()}")

    def _prune(self, saved: pathlib.Path) -> None:
        """Deletes what need not stay, now that the checkpoint at `saved` is in its place."""
        paths = self.paths()
        kept = set(paths[: self.keep_last])
        if self.keep_best:
            kept |= set(self._ranked(paths)[: self.keep_best])
        for path in paths:
            if path not in kept:
                # Renamed first, so that no half of it is ever taken for a checkpoint.
                old = path.with_name(f".{path.name}.old")
                try:
                    os.rename(path, old)
                    shutil.rmtree(old)
                except OSError as error:
                    error.add_note(f"The checkpoint {saved} is in its place; {path} was to go.")
                    raise

    def _ranked(self, paths: list[pathlib.Path]) -> list[pathlib.Path]:
        """Those with a score, the best first; among equal ones the newest first."""
        sign = 1 if self.mode == "min" else -1
        scores = {}
        for path in paths:
            with contextlib.suppress(ValueError, OSError):
                score = read_manifest(path).score
                if score is not None and math.isfinite(score):
                    scores[path] = sign * score
        return sorted(scores, key=scores.__getitem__)
