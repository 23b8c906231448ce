"""Locks between processes, which end with the process that has them."""

import errno
import os
import pathlib

try:
    import fcntl
except ImportError:  # Windows, where nothing is locked
    fcntl = None

_NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)


def lock(path: pathlib.Path) -> int | None:
    """Locks a file or folder that exists.

    **Returns:** what `unlock` takes; `None` where the system, or the disk, has no such locks.

    **Raises:** `BlockingIOError` if somebody has it; `OSError` as `os.open` does.
    """
    if fcntl is None:
        return None
    descriptor = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BaseException as error:
        os.close(descriptor)
        # Some file systems of clusters and networks are mounted without.
        if isinstance(error, OSError) and error.errno in _NO_LOCKS:
            return None
        raise
    return descriptor


def unlock(descriptor: int | None) -> None:
    """Gives a lock back."""
    if descriptor is not None:
        os.close(descriptor)
