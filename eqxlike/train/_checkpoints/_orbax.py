"""Writing and reading of checkpoints with Orbax, and `Saving`, a save in the background."""

import atexit
import contextlib
import functools
import math
import os
import pathlib
import re
import threading
import time
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import jax
import numpy as np

from .._checks import importing
from ._manifest import ARRAYS, MANIFEST, CheckpointError, seal


def orbax() -> ModuleType:
    """Imports Orbax. Raises `ImportError` if it is missing."""
    with importing("Checkpoints need Orbax", "train"):
        import orbax.checkpoint
    return orbax.checkpoint


def write(
    path: pathlib.Path,
    step: int,
    manifest: dict[str, Any],
    arrays: dict[str, Any],
    score: float | None,
    **kept: Any,
) -> "Saving":
    """Starts to write a checkpoint. Orbax then deletes checkpoints that need not be kept."""
    args, is_score = orbax().args, score is not None and math.isfinite(score)
    _join_at_exit()
    # `_NO_ARRAYS` is needed, because Orbax does not write an empty tree.
    items = {MANIFEST: args.JsonSave(manifest), ARRAYS: args.PyTreeSave(arrays or _NO_ARRAYS)}
    metrics = {"score": float(score or 0) if is_score else None}
    # The user's `jax.transfer_guard` should stop accidental transfers. The transfers here are
    # intended, so allow them.
    with _with_path_in_errors(path), jax.transfer_guard("allow"):
        path.parent.mkdir(parents=True, exist_ok=True)
        manager = open_manager(path.parent, writes=True, **kept)
        manager.save(step, args=args.Composite(**items), metrics=metrics, force=True)
    return Saving(path, manager)


_NO_ARRAYS = {"none": np.zeros(1)}


def open_manager(
    folder: pathlib.Path, *, keep_last: int, keep_best: int | None, mode: str, writes: bool
) -> Any:
    """Orbax's manager of the checkpoints in a folder.

    **Arguments:**

    - `keep_last`, `keep_best`, `mode`: see `CheckpointFolder`.
    - `writes`: whether to delete temporary folders that killed processes left behind.
    """
    ocp, sign = orbax(), 1 if mode == "max" else -1

    def quality(metrics: dict[str, Any]) -> float:
        return -math.inf if metrics["score"] is None else sign * metrics["score"]

    managers, registry = ocp.checkpoint_managers, ocp.DefaultCheckpointHandlerRegistry()
    best = managers.BestN(get_metric_fn=quality, n=keep_best or 0)
    # The order of the items matters, because Orbax finalises them in this order.
    handler = ocp.JsonCheckpointHandler(filename="manifest.json")
    registry.add(MANIFEST, ocp.args.JsonSave, handler)
    registry.add(ARRAYS, ocp.args.PyTreeSave, _array_handler())
    options = ocp.CheckpointManagerOptions(
        best_fn=quality,
        preservation_policy=managers.AnyPreservationPolicy([managers.LatestN(keep_last), best]),
        step_prefix="step",
        step_format_fixed_length=9,
        create=False,
        cleanup_tmp_directories=writes,
        # If a folder cannot be created, asynchronous creation would make the writing threads wait
        # for minutes.
        async_options=ocp.AsyncOptions(create_directories_asynchronously=False),
    )
    try:
        return ocp.CheckpointManager(folder, options=options, handler_registry=registry)
    except ValueError as error:
        raise CheckpointError(
            f"One of the files {folder}/step_*/metrics/metrics is damaged."
        ) from error


def _array_handler() -> Any:
    class Arrays(orbax().PyTreeCheckpointHandler):
        # Orbax calls `finalize` when all files are written, before it renames the folder.
        def finalize(self, directory: Any) -> None:
            arrays = pathlib.Path(directory)
            seal(arrays.parent / MANIFEST / "manifest.json", arrays)

    # OCDBT is off, so that each array has its own folder, and the path of a damaged file shows the
    # name of the array. Compression is off, because it hardly shrinks weights.
    return Arrays(use_ocdbt=False, use_zarr3=False, use_compression=False)


def read_arrays(
    folder: pathlib.Path, shardings: dict[str, jax.sharding.Sharding | None]
) -> dict[str, Any]:
    """Reads arrays of a checkpoint by name.

    An array with a sharding becomes a JAX array, and each device reads its part. An array without a
    sharding becomes a NumPy array.
    """
    if not shardings:
        return {}
    # To read JAX arrays, Orbax needs a path object of `etils`, one of its dependencies.
    from etils import epath

    ocp = orbax()
    restore_args = {
        name: ocp.ArrayRestoreArgs(restore_type=jax.Array, sharding=sharding)
        if sharding is not None
        else ocp.RestoreArgs(restore_type=np.ndarray)
        for name, sharding in shardings.items()
    }
    names = dict.fromkeys(shardings, 0)
    args = ocp.args.PyTreeRestore(names, restore_args=restore_args, partial_restore=True)
    with contextlib.closing(_array_handler()) as handler:
        return handler.restore(epath.Path(folder / ARRAYS), args=args)


class Saving:
    """A save that is in progress or finished.

    - `path`: the folder of the checkpoint.
    """

    def __init__(self, path: pathlib.Path, manager: Any) -> None:
        self.path, self._manager = str(path), manager
        self._is_over, self._error, self._lock = False, None, threading.Lock()
        _under_way.append(self)

    @property
    def is_done(self) -> bool:
        """True if the checkpoint is complete, or writing has failed."""
        return self._is_over or not self._manager.is_saving_in_progress()

    def wait(self) -> None:
        """Waits until the checkpoint is complete.

        **Raises:** the error, such as `OSError`, if writing failed. Earlier checkpoints stay.
        """
        error = self.join()
        _under_way[:] = [each for each in _under_way if each is not self]
        if error is not None:
            raise error

    def join(self) -> Exception | None:
        """Waits until the checkpoint is complete or has failed, and returns the error."""
        # Poll instead of waiting in Orbax. Up to Python 3.12, Ctrl-C during Orbax's wait would mark
        # Orbax's thread as finished.
        while not self.is_done:
            time.sleep(0.002)
        with self._lock:
            if not self._is_over:
                try:
                    with _with_path_in_errors(self.path):
                        self._manager.wait_until_finished()
                        self._manager.close()
                except Exception as error:
                    self._error = error
                self._is_over = True
        return self._error


_under_way: list[Saving] = []
"""Saves for which `wait` or `join` was not called."""


def join_all(raises_in: pathlib.Path | None = None) -> None:
    """Waits for all saves. Raises an error only if a save in the folder `raises_in` failed.

    If a save in another folder failed, only the method `wait` of its `Saving` raises the error.
    """
    for each in list(_under_way):
        if each.join() is None or pathlib.Path(each.path).parent == raises_in:
            each.wait()


@functools.cache
def _join_at_exit() -> None:
    """Makes the interpreter wait for all saves before it exits. Orbax prints errors."""
    # `atexit` runs too late: by then, the thread pools that Orbax uses no longer accept work.
    # Python 3.9 to 3.14 has an earlier hook, but only as this private function.
    getattr(threading, "_register_atexit", atexit.register)(join_all)


@contextlib.contextmanager
def _with_path_in_errors(path: pathlib.Path | str) -> Iterator[None]:
    """Context manager that raises system errors as `OSError` with the path of the checkpoint.

    System errors that tensorstore reports only as text are converted too.
    """
    try:
        yield
    except (OSError, ValueError) as error:
        hidden = re.search(r"os_error_code='(\d+)'", str(error))
        number = int(hidden[1]) if hidden else getattr(error, "errno", None)
        if number is None:
            raise
        # `OSError(errno, ...)` creates the subclass for this `errno`, such as `PermissionError`.
        reason = f"{os.strerror(number)}, while writing a checkpoint"
        raise OSError(number, reason, str(path)) from error
