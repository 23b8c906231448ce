"""Locks between processes, which end with the process that has them."""

import os
import pathlib

try:
    import fcntl
except ImportError:  # Windows, where nothing is locked
    fcntl = None


def lock(path: pathlib.Path) -> int | None:
    """Locks a file or folder that exists.

    **Returns:** what `unlock` takes; `None` where the system has no such locks.

    **Raises:** `BlockingIOError` if somebody has it; `OSError` as `os.open` does.
    """
    if fcntl is None:
        return None
    descriptor = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def unlock(descriptor: int | None) -> None:
    """Gives a lock back."""
    if descriptor is not None:
        os.close(descriptor)
