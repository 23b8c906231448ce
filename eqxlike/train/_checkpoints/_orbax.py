"""Orbax, which writes and reads the files, and a save that is under way."""

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

from ._manifest import ARRAYS, MANIFEST, CheckpointError, seal


def orbax() -> ModuleType:
    """Orbax, imported on first use.

    **Raises:** `ImportError`, with what to install.
    """
    try:
        import orbax.checkpoint
    except ImportError as error:
        message = "Checkpoints are written by Orbax: `pip install 'eqxlike[train]'`."
        raise ImportError(message) from error
    return orbax.checkpoint


def write(
    path: pathlib.Path,
    step: int,
    manifest: dict[str, Any],
    arrays: dict[str, Any],
    score: float | None,
    **kept: Any,
) -> "Saving":
    """Begins to write a checkpoint; then those go that need not stay, see `open_manager`."""
    args, is_score = orbax().args, score is not None and math.isfinite(score)
    _join_at_exit()
    # Orbax refuses to write no arrays.
    items = {MANIFEST: args.JsonSave(manifest), ARRAYS: args.PyTreeSave(arrays or _NO_ARRAYS)}
    metrics = {"score": float(score or 0) if is_score else None}
    # `jax.transfer_guard` is for accidental transfers; this one is asked for.
    with _naming(path), jax.transfer_guard("allow"):
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

    - `keep_last`, `keep_best`, `mode`: which checkpoints stay, see `CheckpointFolder`.
    - `writes`: whether to delete what killed processes left half-made.
    """
    ocp, sign = orbax(), 1 if mode == "max" else -1

    def quality(metrics: dict[str, Any]) -> float:
        return -math.inf if metrics["score"] is None else sign * metrics["score"]

    managers, registry = ocp.checkpoint_managers, ocp.DefaultCheckpointHandlerRegistry()
    best = managers.BestN(get_metric_fn=quality, n=keep_best or 0)
    # Items are finished in this order.
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
        # Where a folder cannot be made, the threads that write would wait for it for minutes.
        async_options=ocp.AsyncOptions(create_directories_asynchronously=False),
    )
    try:
        return ocp.CheckpointManager(folder, options=options, handler_registry=registry)
    except ValueError as error:
        raise CheckpointError(f"A file {folder}/step_*/metrics/metrics is damaged.") from error


def _array_handler() -> Any:
    class Arrays(orbax().PyTreeCheckpointHandler):
        # Orbax calls it once all is written, before it moves the checkpoint into place.
        def finalize(self, directory: Any) -> None:
            arrays = pathlib.Path(directory)
            seal(arrays.parent / MANIFEST / "manifest.json", arrays)

    # A folder for each array, so that a damaged file tells which array it was part of; and no
    # compression, since weights hardly shrink.
    return Arrays(use_ocdbt=False, use_zarr3=False, use_compression=False)


def read_arrays(
    folder: pathlib.Path, shardings: dict[str, jax.sharding.Sharding | None]
) -> dict[str, Any]:
    """Arrays of a checkpoint by their names.

    An array with a sharding becomes a JAX array, and each device reads its part. Others become
    NumPy arrays.
    """
    if not shardings:
        return {}
    # `etils` is a dependency of Orbax, which accepts only its paths for JAX arrays.
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
    """A checkpoint that is being written, or was.

    - `path`: where it goes.
    """

    def __init__(self, path: pathlib.Path, manager: Any) -> None:
        self.path, self._manager = str(path), manager
        self._is_over, self._error, self._lock = False, None, threading.Lock()
        _under_way.append(self)

    @property
    def is_done(self) -> bool:
        """Whether the checkpoint is in its place, or will never be."""
        return self._is_over or not self._manager.is_saving_in_progress()

    def wait(self) -> None:
        """Waits until the checkpoint is in its place.

        **Raises:** what went wrong in writing it, such as `OSError`; what was there before stays.
        """
        error = self.join()
        _under_way[:] = [each for each in _under_way if each is not self]
        if error is not None:
            raise error

    def join(self) -> Exception | None:
        """Waits until it is written, or has failed, and returns the error."""
        # Up to Python 3.12, Ctrl-C while Orbax waits would mark its thread as finished.
        while not self.is_done:
            time.sleep(0.002)
        with self._lock:
            if not self._is_over:
                try:
                    with _naming(self.path):
                        self._manager.wait_until_finished()
                        self._manager.close()
                except Exception as error:
                    self._error = error
                self._is_over = True
        return self._error


_under_way: list[Saving] = []
"""Those for which nobody has waited."""


def join_all(raises_in: pathlib.Path | None = None) -> None:
    """Waits for all checkpoints that are being written.

    Only an error of a checkpoint in the folder `raises_in` is raised. `Saving.wait` raises others.
    """
    for each in list(_under_way):
        if each.join() is None or pathlib.Path(each.path).parent == raises_in:
            each.wait()


@functools.cache
def _join_at_exit() -> None:
    """Has the interpreter wait for what is being written before it exits. Orbax prints errors."""
    # At `atexit` it is too late: pools of threads take no more work then, and Orbax uses some.
    # Python has no public name for the moment before; from 3.9 to 3.14 it is this one.
    getattr(threading, "_register_atexit", atexit.register)(join_all)


@contextlib.contextmanager
def _naming(path: pathlib.Path | str) -> Iterator[None]:
    """Names the checkpoint in errors of the system, also where tensorstore has them as a text."""
    try:
        yield
    except (OSError, ValueError) as error:
        hidden = re.search(r"os_error_code='(\d+)'", str(error))
        number = int(hidden[1]) if hidden else getattr(error, "errno", None)
        if number is None:
            raise
        # Python finds the subclass by the number.
        reason = f"{os.strerror(number)}, in writing a checkpoint there"
        raise OSError(number, reason, str(path)) from error
