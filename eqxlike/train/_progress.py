"""A progress bar on a terminal, lines of text elsewhere."""

import importlib.util
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO


@contextmanager
def progress(
    num_steps: int, *, label: str = "training", stream: TextIO | None = None, num_lines: int = 10
) -> Iterator[Callable[[int, float], None]]:
    """Shows how far training is; gives the function to pass to `fit` as `on_log`.

    **Arguments:**

    - `num_steps`: what counts as done.
    - `label`: what is trained.
    - `stream`: where to write, standard error by default. A terminal gets a bar if `rich` is
      installed, anything else lines of text.
    - `num_lines`: at most so many lines, spread evenly over the steps, however often it is called.

    >>> with progress(200, label="diabetes", stream=sys.stdout, num_lines=2) as on_log:
    ...     for step in range(50, 201, 50):
    ...         on_log(step, 1 / step)
    diabetes: step 100/200, loss 0.01
    diabetes: step 200/200, loss 0.005
    """
    output: TextIO = sys.stderr if stream is None else stream
    if output.isatty() and importlib.util.find_spec("rich") is not None:
        with _bar(num_steps, label, output) as on_log:
            yield on_log
    else:
        yield _lines(num_steps, label, output, num_lines)


def _lines(
    num_steps: int, label: str, stream: TextIO, num_lines: int
) -> Callable[[int, float], None]:
    num_shown = 0

    def on_log(step: int, loss: float) -> None:
        nonlocal num_shown
        due = step * num_lines // num_steps
        if due > num_shown:
            num_shown = due
            print(f"{label}: step {step}/{num_steps}, loss {loss:.4g}", file=stream, flush=True)

    return on_log


@contextmanager
def _bar(num_steps: int, label: str, stream: TextIO) -> Iterator[Callable[[int, float], None]]:
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
        TextColumn("loss {task.fields[loss]}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(file=stream)) as bar:
        task = bar.add_task(label, total=num_steps, loss="-")
        yield lambda step, loss: bar.update(task, completed=step, loss=f"{loss:.4g}")
