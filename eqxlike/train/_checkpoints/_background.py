"""Writing in the background: one checkpoint at a time, and no error lost."""

import atexit
import errno
import os
import pathlib
import sys
import threading
import traceback
from collections.abc import Callable
from typing import TypeVar

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
        # Not the thread's own `join`: one that Ctrl-C interrupts takes the thread for ended, up to
        # Python 3.12.
        self._is_over = threading.Event()
        self._is_over.set()
        self._error: BaseException | None = None
        self._is_told = False
        self._began_in = threading.get_ident()

    def __repr__(self) -> str:
        how = "being written" if not self.is_done else "failed" if self._error else "written"
        return f"Saving({self.path!r}, {how})"

    @property
    def is_done(self) -> bool:
        """Whether the checkpoint is in its place, or will never be."""
        return self._is_over.is_set()

    def wait(self) -> None:
        """Waits until the checkpoint is in its place.

        **Raises:** what went wrong in writing it, such as `OSError`; what was there before stays.
        """
        self.join()
        if self._error is not None:
            self._is_told = True
            raise self._error

    def run(self, write: Callable[[], None]) -> None:
        """Calls `write` in a thread of its own."""
        is_taken = threading.Lock()

        def target() -> None:
            if not is_taken.acquire(blocking=False):
                return
            try:
                write()
            except BaseException as error:
                self._error = error
            finally:
                self._is_over.set()

        self._is_over.clear()
        try:
            threading.Thread(target=target, name=f"saving {self.path}").start()
        except BaseException as error:
            # Ctrl-C, or no more threads. Where it has not begun to write it never will.
            if is_taken.acquire(blocking=False):
                self._error, self._is_told = error, True
                self._is_over.set()
            raise

    def tell(self) -> None:
        """Prints the error, if there is one that nobody has seen."""
        self.join()
        if self.has_untold_error:
            self._is_told = True
            print(f"The checkpoint {self.path} was not written:", file=sys.stderr)
            traceback.print_exception(self._error)

    def join(self) -> None:
        """Waits until it is written, or has failed."""
        self._is_over.wait()

    @property
    def has_untold_error(self) -> bool:
        """Whether something went wrong that nobody has seen."""
        return self._error is not None and not self._is_told

    @property
    def is_of_this_thread(self) -> bool:
        """Whether it is this thread that asked for it."""
        return self._began_in == threading.get_ident()


_lock = threading.RLock()
# The last one, which may be under way, and others of which nobody has seen that they failed.
_begun: list[Saving] = []
_waits_at_exit = False


def save_in_turn(path: str, begin: Callable[[], Callable[[], None]], background: bool) -> Saving:
    """Calls `begin` when those before it are written, so that one copy of a state is held at a
    time, and then what it returns, in the background or at once.

    **Raises:** the error of one that this thread began before, if nobody has seen it; this one is
    not begun then.
    """
    with _lock:
        wait_for_newest()
        _begun[:] = [each for each in _begun if each.has_untold_error]
        for each in _begun:
            if each.is_of_this_thread:
                each.wait()
        write = begin()
        saving = Saving(path)
        if background:
            _wait_at_exit()
            # From here on it is waited for, also where Ctrl-C comes before the next line.
            _begun.append(saving)
            saving.run(write)
        else:
            write()
        return saving


def wait_for_newest() -> None:
    """Waits for what is being written; its error is left to those who ask for it."""
    # Another thread may be about to begin one.
    with _lock:
        for each in _begun:
            each.join()


def _wait_at_exit() -> None:
    """Has the interpreter wait for what is being written, before it exits."""
    global _waits_at_exit
    if _waits_at_exit:
        return
    _waits_at_exit = True
    # By the time of `atexit`, no pool of threads takes work any more, and Orbax has some. Python
    # has no public name for the moment before; from 3.9 to 3.14 it is this one.
    register = getattr(threading, "_register_atexit", atexit.register)
    register(_tell_at_exit)


def _tell_at_exit() -> None:
    for each in _begun:
        each.tell()


# --- Locks between processes, which end with the process that has them ---


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


# --- What several processes of one run do together ---


Result = TypeVar("Result")


def together(action: Callable[[], Result]) -> Result:
    """`action()` in every process, which go on when all are done.

    **Raises:** what `action` raises here; `OSError` if it raised in another process, so that none
    waits for one that has given up.
    """
    if jax.process_count() == 1:
        return action()
    error, result = None, None
    try:
        result = action()
    except Exception as raised:
        error = raised
    is_well = np.asarray(multihost_utils.process_allgather(np.array(error is None)))
    if error is not None:
        raise error
    if not is_well.all():
        failed = ", ".join(map(str, np.flatnonzero(~is_well.reshape(-1))))
        raise OSError(f"A checkpoint failed in process {failed}, whose own error says why.")
    return result  # pyright: ignore


def in_first(action: Callable[[], Result]) -> Result | None:
    """`action()` in the first process alone, for which the others wait; `None` in them."""
    return together(lambda: action() if jax.process_index() == 0 else None)
