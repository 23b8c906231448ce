"""How far a run is: a bar on a terminal, lines of text elsewhere."""

import importlib.util
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO

OnStep = Callable[[int, str], None]
"""Called with the number of steps that are done, and what to say of the last."""


@contextmanager
def run_progress(
    num_steps: int, label: str, *, stream: TextIO | None = None, num_lines: int = 10
) -> Iterator[OnStep]:
    """Shows how far a run is.

    **Arguments:**

    - `num_steps`: what counts as done.
    - `label`: what runs.
    - `stream`: where to write, standard error by default. A terminal gets a bar if `rich` is
      installed, anything else lines of text.
    - `num_lines`: at most so many lines, spread evenly over the steps, however often it is called.
    """
    output: TextIO = sys.stderr if stream is None else stream
    if output.isatty() and importlib.util.find_spec("rich") is not None:
        with _bar(num_steps, label, output) as on_step:
            yield on_step
    else:
        yield _lines(num_steps, label, output, num_lines)


def _lines(num_steps: int, label: str, stream: TextIO, num_lines: int) -> OnStep:
    num_shown = 0

    def on_step(step: int, text: str) -> None:
        nonlocal num_shown
        due = step * num_lines // num_steps
        if due > num_shown:
            num_shown = due
            print(f"{label}: step {step}/{num_steps}, {text}", file=stream, flush=True)

    return on_step


@contextmanager
def _bar(num_steps: int, label: str, stream: TextIO) -> Iterator[OnStep]:
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[text]}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(file=stream)) as bar:
        task = bar.add_task(label, total=num_steps, text="-")
        yield lambda step, text: bar.update(task, completed=step, text=text)
