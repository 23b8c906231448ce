"""Delays Ctrl-C and SIGTERM until a moment at which it is safe to stop."""

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

TERMINATED = 128 + signal.SIGTERM
"""The exit status of a process that SIGTERM has ended."""


class Interrupt:
    """Records Ctrl-C, and SIGTERM, which schedulers and containers send before they kill."""

    def __init__(self) -> None:
        self.is_requested = False
        self.is_termination = False

    def handle(self, signal_number: int, frame: FrameType | None) -> None:
        """Records the first signal. The second one raises at once, as without this handler."""
        is_second, self.is_requested = self.is_requested, True
        self.is_termination |= signal_number == signal.SIGTERM
        if is_second and signal_number == signal.SIGTERM:
            raise SystemExit(TERMINATED)
        if is_second:
            signal.default_int_handler(signal_number, frame)

    def exception(self, message: str) -> KeyboardInterrupt | SystemExit:
        """The exception to raise when it is safe to stop. After SIGTERM, prints `message`."""
        if not self.is_termination:
            return KeyboardInterrupt(message)
        print(message, file=sys.stderr)
        return SystemExit(TERMINATED)


@contextmanager
def delayed_interrupt() -> Iterator[Interrupt]:
    """Context manager that records the first Ctrl-C or SIGTERM instead of raising an exception.

    So no exception can be raised after a call has donated its arguments and before its result is
    stored. Handlers that other code has installed stay. Outside of the main thread, where Python
    delivers no signals, the context does nothing.
    """
    interrupt = Interrupt()
    is_main_thread = threading.current_thread() is threading.main_thread()
    defaults = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}
    replaced = {
        each: default
        for each, default in defaults.items()
        if is_main_thread and signal.getsignal(each) is default
    }
    for each in replaced:
        signal.signal(each, interrupt.handle)
    try:
        yield interrupt
    finally:
        for each, default in replaced.items():
            signal.signal(each, default)
