"""Ctrl-C, and the signal that asks a process to end, at a moment of our choosing."""

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

TERMINATED = 128 + signal.SIGTERM
"""The exit status of a process that was asked to end."""


class Interrupt:
    """Whether Ctrl-C came, or SIGTERM, which schedulers and containers send before they kill."""

    def __init__(self) -> None:
        self.is_requested = False
        self.is_termination = False

    def handle(self, signal_number: int, frame: FrameType | None) -> None:
        """Remembers the first signal; at the second raises what it raises elsewhere."""
        is_second, self.is_requested = self.is_requested, True
        self.is_termination |= signal_number == signal.SIGTERM
        if is_second and signal_number == signal.SIGTERM:
            raise SystemExit(TERMINATED)
        if is_second:
            signal.default_int_handler(signal_number, frame)

    def exception(self, message: str) -> KeyboardInterrupt | SystemExit:
        """What to raise once everything is in order; a process that is to end says `message`."""
        if not self.is_termination:
            return KeyboardInterrupt(message)
        print(message, file=sys.stderr)
        return SystemExit(TERMINATED)


@contextmanager
def delayed_interrupt() -> Iterator[Interrupt]:
    """Holds back the first Ctrl-C or SIGTERM, so that it cannot fall between a call that donates
    and its result.

    A handler that somebody else installed is left alone, as is everything outside the main thread,
    where Python delivers no signals.
    """
    interrupt = Interrupt()
    is_main_thread = threading.current_thread() is threading.main_thread()
    defaults = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}
    ours_to_replace = {
        each: default
        for each, default in defaults.items()
        if is_main_thread and signal.getsignal(each) is default
    }
    for each in ours_to_replace:
        signal.signal(each, interrupt.handle)
    try:
        yield interrupt
    finally:
        for each, default in ours_to_replace.items():
            signal.signal(each, default)
