"""Long runs: displays of the progress, and delayed Ctrl-C and SIGTERM.

The display is a bar by rich or tqdm on a terminal, and lines of text elsewhere.
"""

import importlib.util
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, ClassVar, TextIO

OnStep = Callable[..., Any]
"""A function that is called as `on_step(step, text, is_last=False)` with the number of finished
steps and a text about the latest step. It returns `True` if it has displayed the text.
"""


@contextmanager
def run_progress(
    num_steps: int, label: str, *, stream: TextIO | None = None, num_lines: int = 10
) -> Iterator[OnStep]:
    """Context manager that displays the progress of a run. It yields an `OnStep` function.

    **Arguments:**

    - `num_steps`: number of steps of the run.
    - `label`: name of the run.
    - `stream`: file to write to, by default standard error. If it is a terminal and `rich` is
      installed, a bar is drawn. Otherwise lines of text are written.
    - `num_lines`: maximum number of lines. The lines are spread evenly over the steps.
    """
    output: TextIO = sys.stderr if stream is None else stream
    if output.isatty() and is_installed("rich"):
        with _rich_bars(output, "{task.fields[text]}") as bars:
            task = bars.add_task(label, total=num_steps, text="-")
            yield lambda step, text, is_last=False: not bars.update(task, completed=step, text=text)
        return
    num_shown = 0

    def on_step(step: int, text: str, is_last: bool = False) -> bool:
        nonlocal num_shown
        due = step * num_lines // num_steps
        is_shown = due > num_shown or is_last
        if is_shown:
            num_shown = due
            print(f"{label}: step {step}/{num_steps}, {text}", file=output, flush=True)
        return is_shown

    yield on_step


# --- Displays of loops in compiled programs ---


class Lines:
    """Displays the progress of one loop as lines of text.

    **Arguments:**

    - `total`: number of steps, or `None` if it is unknown.
    """

    def __init__(self, total: int | None, description: str, stream: TextIO):
        self._stream = stream

    def show(self, done: int, line: str) -> None:
        """Displays that `done` steps are finished. `line` is a line of text that says the same."""
        print(line, file=self._stream, flush=True)

    def close(self) -> None:
        """Ends the display."""


class _Tqdm(Lines):
    """A bar by tqdm."""

    def __init__(self, total: int | None, description: str, stream: TextIO):
        import tqdm

        # `mininterval=0`, because the caller already limits how often the bar is drawn.
        self._bar = tqdm.tqdm(total=total, desc=description or None, file=stream, mininterval=0)

    def show(self, done: int, line: str) -> None:
        if done <= self._bar.n:
            self._bar.reset()
        self._bar.n = done
        self._bar.refresh()

    def close(self) -> None:
        self._bar.close()


class _Rich(Lines):
    """A bar by rich. All bars on one stream are drawn together."""

    _together: ClassVar[dict[TextIO, Any]] = {}

    def __init__(self, total: int | None, description: str, stream: TextIO):
        super().__init__(total, description, stream)
        if stream not in self._together:
            self._together[stream] = _rich_bars(stream, auto_refresh=False)
            self._together[stream].start()
        self._bars = self._together[stream]
        self._task = self._bars.add_task(description, total=total)
        self._bars.refresh()
        self._done = 0

    def show(self, done: int, line: str) -> None:
        if done <= self._done:
            self._bars.reset(self._task)
        self._done = done
        self._bars.update(self._task, completed=done)
        self._bars.refresh()

    def close(self) -> None:
        self._bars.stop_task(self._task)
        if all(task.stop_time is not None for task in self._bars.tasks):
            self._bars.stop()
            self._together.pop(self._stream, None)


DISPLAYS = {"rich": _Rich, "tqdm": _Tqdm, "lines": Lines}


def is_installed(name: str) -> bool:
    """Whether a package can be imported."""
    return importlib.util.find_spec(name) is not None


def _rich_bars(stream: TextIO, text: str | None = None, **options: Any) -> Any:
    """Makes a `rich.progress.Progress`. Its bars show the column `text`, or the elapsed time."""
    from rich import progress as rich
    from rich.console import Console

    return rich.Progress(
        rich.TextColumn("{task.description}"),
        rich.BarColumn(),
        rich.MofNCompleteColumn(),
        rich.TextColumn(text) if text else rich.TimeElapsedColumn(),
        rich.TimeRemainingColumn(),
        console=Console(file=stream),
        **options,
    )


# --- Stopping a run at a moment at which it is safe ---


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
