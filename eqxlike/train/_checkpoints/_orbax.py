"""Orbax, which writes and reads the files, and a save that is under way."""

import atexit
import contextlib
import functools
import os
import pathlib
import re
import threading
import time
from collections.abc import Iterator
from types import ModuleType
from typing import Any

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


def open_manager(folder: pathlib.Path, *, writes: bool, **options: Any) -> Any:
    """Orbax's manager of the checkpoints in a folder.

    **Arguments:**

    - `writes`: whether to delete what killed processes left half-made.
    - `options`: of Orbax's `CheckpointManagerOptions`.
    """
    ocp = orbax()
    registry = ocp.DefaultCheckpointHandlerRegistry()
    # Items are finished in this order.
    handler = ocp.JsonCheckpointHandler(filename="manifest.json")
    registry.add(MANIFEST, ocp.args.JsonSave, handler)
    registry.add(ARRAYS, ocp.args.PyTreeSave, _array_handler())
    options = ocp.CheckpointManagerOptions(
        step_prefix="step",
        step_format_fixed_length=9,
        create=False,
        cleanup_tmp_directories=writes,
        # Where a folder cannot be made, the threads that write would wait for it for minutes.
        async_options=ocp.AsyncOptions(create_directories_asynchronously=False),
        **options,
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


def read_arrays(folder: pathlib.Path, arguments: dict[str, Any]) -> dict[str, Any]:
    """The arrays of a checkpoint by their names, each read as Orbax's `RestoreArgs` say."""
    if not arguments:
        return {}
    # `etils` is a dependency of Orbax, which accepts only its paths for JAX arrays.
    from etils import epath

    args = orbax().args.PyTreeRestore(
        dict.fromkeys(arguments, 0), restore_args=arguments, partial_restore=True
    )
    with contextlib.closing(_array_handler()) as handler:
        return handler.restore(epath.Path(folder / ARRAYS), args=args)


class Saving:
    """A checkpoint that is being written, or was.

    - `path`: where it goes.
    """

    def __init__(self, path: pathlib.Path, manager: Any) -> None:
        self.path, self._manager = str(path), manager
        self._is_over, self._error, self._lock = False, None, threading.Lock()
        under_way.append(self)

    @property
    def is_done(self) -> bool:
        """Whether the checkpoint is in its place, or will never be."""
        return self._is_over or not self._manager.is_saving_in_progress()

    def wait(self) -> None:
        """Waits until the checkpoint is in its place.

        **Raises:** what went wrong in writing it, such as `OSError`; what was there before stays.
        """
        error = self.join()
        under_way[:] = [each for each in under_way if each is not self]
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
                    with naming(self.path):
                        self._manager.wait_until_finished()
                        self._manager.close()
                except Exception as error:
                    self._error = error
                self._is_over = True
        return self._error


under_way: list[Saving] = []
"""Those for which nobody has waited."""


def join_all() -> None:
    """Waits for what is being written; errors are left to those who ask for them."""
    for each in list(under_way):
        if each.join() is None:
            each.wait()


@functools.cache
def join_at_exit() -> None:
    """Has the interpreter wait for what is being written before it exits. Orbax prints errors."""
    # At `atexit` it is too late: pools of threads take no more work then, and Orbax uses some.
    # Python has no public name for the moment before; from 3.9 to 3.14 it is this one.
    getattr(threading, "_register_atexit", atexit.register)(join_all)


@contextlib.contextmanager
def naming(path: pathlib.Path | str) -> Iterator[None]:
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
