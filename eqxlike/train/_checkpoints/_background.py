"""Who writes when: one save at a time, in the background or at once; all processes of one run
together; of several runs only the one that has the lock.
"""

import atexit
import concurrent.futures
import errno
import functools
import os
import pathlib
import sys
import threading
import traceback
from collections.abc import Callable

import jax
import numpy as np
from jax.experimental import multihost_utils

try:
    import fcntl
except ImportError:  # Windows, where nothing is locked
    fcntl = None


class Saving:
    """A checkpoint that is being written, or was.

    - `path`: where it goes.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        # Not the thread's own `join`: up to Python 3.12, a `join` interrupted by Ctrl-C marks the
        # thread as finished.
        self._written: concurrent.futures.Future[None] = concurrent.futures.Future()
        self._is_error_seen = False
        self._began_in = threading.get_ident()

    def __repr__(self) -> str:
        how = "being written" if not self.is_done else "failed" if self.join() else "written"
        return f"Saving({self.path!r}, {how})"

    @property
    def is_done(self) -> bool:
        """Whether the checkpoint is in its place, or will never be."""
        return self._written.done()

    def wait(self) -> None:
        """Waits until the checkpoint is in its place.

        **Raises:** what went wrong in writing it, such as `OSError`; what was there before stays.
        """
        error = self.join()
        if error is not None:
            self._is_error_seen = True
            raise error

    def join(self) -> BaseException | None:
        """Waits until it is written, or has failed, and returns the error."""
        return self._written.exception()

    def _run(self, write: Callable[[], None]) -> None:
        if not self._written.set_running_or_notify_cancel():
            return
        try:
            write()
        except BaseException as error:
            self._written.set_exception(error)
        else:
            self._written.set_result(None)


_lock = threading.RLock()
# The newest save, which may be under way, and earlier ones whose error nobody has seen.
_begun: list[Saving] = []


def save_in_turn(path: str, begin: Callable[[], Callable[[], None]], background: bool) -> Saving:
    """Waits for earlier saves, calls `begin`, and then the function that it returns, in the
    background or at once. So at most one copy of a state is held at a time.

    **Raises:** the error of an earlier save of this thread, if nobody has seen it; `begin` is not
    called then.
    """
    with _lock:
        wait_for_newest()
        _begun[:] = [each for each in _begun if each.join() and not each._is_error_seen]
        for each in _begun:
            if each._began_in == threading.get_ident():
                each.wait()
        write, saving = begin(), Saving(path)
        if not background:
            saving._run(write)
            saving.wait()
            return saving
        _print_errors_at_exit()
        try:
            # Before the thread starts, so that it is waited for wherever Ctrl-C comes.
            _begun.append(saving)
            name = f"saving {saving.path}"
            threading.Thread(target=saving._run, args=[write], name=name).start()
        except BaseException:
            # Ctrl-C, or no more threads. If writing has not begun, it never will.
            if saving._written.cancel():
                _begun.remove(saving)
            raise
        return saving


def wait_for_newest() -> None:
    """Waits for the save under way; its error is left to those who ask for it."""
    # Another thread may be about to begin one.
    with _lock:
        for each in _begun:
            each.join()


@functools.cache
def _print_errors_at_exit() -> None:
    """Has the interpreter wait for what is being written before it exits, and print the errors that
    nobody has seen.
    """

    def print_errors() -> None:
        for each in _begun:
            error = each.join()
            if error and not each._is_error_seen:
                print(f"The checkpoint {each.path} was not written:", file=sys.stderr)
                traceback.print_exception(error)

    # At `atexit` it is too late: pools of threads take no more work then, and Orbax uses some.
    # Python has no public name for the moment before; from 3.9 to 3.14 it is this one.
    getattr(threading, "_register_atexit", atexit.register)(print_errors)


# --- Locks between processes, which end with the process that has them ---


def lock(path: pathlib.Path, busy: str, place: pathlib.Path) -> int:
    """Locks an existing file or folder. Does nothing where the system, or the disk, has no locks.

    **Returns:** a descriptor: `os.close` unlocks.

    **Raises:** `BlockingIOError`, with the text `busy` and the path `place`, if somebody has the
    lock; `FileNotFoundError` if `path` is gone or was replaced; `OSError` as `os.open` does.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        if fcntl is not None:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not os.path.samestat(os.fstat(descriptor), os.stat(path)):
            raise FileNotFoundError(errno.ENOENT, "it was replaced", str(path))
    except OSError as error:
        # Some file systems of clusters and networks are mounted without locks.
        if error.errno in (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP):
            return descriptor
        os.close(descriptor)
        if isinstance(error, BlockingIOError):
            raise BlockingIOError(error.errno, busy, str(place)) from None
        raise
    return descriptor


# --- What several processes of one run do together ---


def together(action: Callable[[], object]) -> None:
    """Calls `action` in every process, and waits until all are done.

    **Raises:** what `action` raises here; `OSError` if it raised in another process, so that none
    waits for one that has given up.
    """
    if jax.process_count() == 1:
        action()
        return
    error: Exception | None = None
    try:
        action()
    except Exception as raised:
        error = raised
    failures = multihost_utils.process_allgather(np.array(error is not None))
    if error is not None:
        raise error
    if failed := ", ".join(map(str, np.flatnonzero(failures))):
        raise OSError(f"A checkpoint failed in process {failed}, whose own error says why.")


def in_first(action: Callable[[], object]) -> None:
    """Calls `action` in the first process alone, for which the others wait."""
    together(lambda: action() if jax.process_index() == 0 else None)
