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
    """Records Ctrl-C and SIGTERM. A scheduler sends SIGTERM before it kills a process."""

    def __init__(self) -> None:
        self.is_requested = False
        self.is_termination = False

    def handle(self, signal_number: int, frame: FrameType | None) -> None:
        """Records the first signal. A second signal raises an exception at once."""
        is_second, self.is_requested = self.is_requested, True
        self.is_termination |= signal_number == signal.SIGTERM
        if is_second and signal_number == signal.SIGTERM:
            raise SystemExit(TERMINATED)
        if is_second:
            signal.default_int_handler(signal_number, frame)

    def exception(self, message: str) -> KeyboardInterrupt | SystemExit:
        """Makes the exception to raise when it is safe to stop. After SIGTERM, prints `message`."""
        if not self.is_termination:
            return KeyboardInterrupt(message)
        print(message, file=sys.stderr)
        return SystemExit(TERMINATED)


@contextmanager
def delayed_interrupt() -> Iterator[Interrupt]:
    """Context manager that records the first Ctrl-C or SIGTERM instead of raising an exception.

    A call that donates its arguments deletes them. Without this context, a signal could raise an
    exception before the result of the call is stored. Then both the arguments and the result would
    be lost. If other code has installed a handler for a signal, this handler stays. In a thread
    other than the main thread, the context does nothing, because Python delivers no signals there.
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
