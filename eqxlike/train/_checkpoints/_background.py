"""Writing in the background: one checkpoint at a time, and no error lost."""

import atexit
import sys
import threading
import traceback
from collections.abc import Callable


class Saving:
    """A checkpoint that is being written, or was.

    - `path`: where it goes.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._is_told = False

    def __repr__(self) -> str:
        how = "being written" if not self.is_done else "failed" if self._error else "written"
        return f"Saving({self.path!r}, {how})"

    @property
    def is_done(self) -> bool:
        """Whether the checkpoint is in its place, or will never be."""
        return self._thread is None or not self._thread.is_alive()

    def wait(self) -> None:
        """Waits until the checkpoint is in its place.

        **Raises:** what went wrong in writing it, such as `OSError`; what was there before stays.
        """
        if self._thread is not None:
            self._thread.join()
        if self._error is not None:
            self._is_told = True
            raise self._error

    def run(self, write: Callable[[], None]) -> None:
        """Calls `write` in a thread of its own."""

        def target() -> None:
            try:
                write()
            except BaseException as error:
                self._error = error

        self._thread = threading.Thread(target=target, name=f"saving {self.path}")
        self._thread.start()

    def tell(self) -> None:
        """Prints the error, if there is one that nobody has seen."""
        if self._thread is not None:
            self._thread.join()
        if self._error is not None and not self._is_told:
            self._is_told = True
            print(f"The checkpoint {self.path} was not written:", file=sys.stderr)
            traceback.print_exception(self._error)

    def raise_untold(self) -> None:
        """Waits; raises the error if there is one that nobody has seen."""
        if self._thread is not None:
            self._thread.join()
        if not self._is_told:
            self.wait()


_lock = threading.RLock()
_newest: Saving | None = None
_waits_at_exit = False


def save_in_turn(path: str, begin: Callable[[], Callable[[], None]], background: bool) -> Saving:
    """Calls `begin` when those before it are written, so that one copy of a state is held at a
    time, and then what it returns, in the background or at once.

    **Raises:** the error of the one before, if nobody has seen it; this one is not begun then.
    """
    global _newest
    with _lock:
        if _newest is not None:
            _newest.raise_untold()
        write = begin()
        saving = Saving(path)
        if background:
            _wait_at_exit()
            # From here on it is waited for, also where Ctrl-C comes before the next line.
            _newest = saving
            saving.run(write)
        else:
            write()
        return saving


def wait_for_newest() -> None:
    """Waits for what is being written; its error is left to those who ask for it."""
    saving = _newest
    if saving is not None and saving._thread is not None:
        saving._thread.join()


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
    if _newest is not None:
        _newest.tell()
