"""Ctrl-C at a moment of our choosing."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class Interrupt:
    """A flag that says whether Ctrl-C came."""

    def __init__(self) -> None:
        self.is_requested = False

    def handle(self, signal_number: int, frame: FrameType | None) -> None:
        """Remembers the first Ctrl-C; raises `KeyboardInterrupt` at the second."""
        if self.is_requested:
            signal.default_int_handler(signal_number, frame)
        self.is_requested = True


@contextmanager
def delayed_interrupt() -> Iterator[Interrupt]:
    """Holds back the first Ctrl-C, so that it cannot fall between a call that donates and its
    result.

    A handler that somebody else installed is left alone, as is everything outside the main thread,
    where Python delivers no signals.
    """
    interrupt = Interrupt()
    is_ours_to_replace = (
        threading.current_thread() is threading.main_thread()
        and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    )
    if not is_ours_to_replace:
        yield interrupt
        return
    signal.signal(signal.SIGINT, interrupt.handle)
    try:
        yield interrupt
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
