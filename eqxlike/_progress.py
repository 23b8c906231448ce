"""How far a run is: a bar on a terminal, lines of text elsewhere."""

import importlib.util
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TextIO

OnStep = Callable[[int, str], None]
"""Called with the number of steps that are done, and what to say of the last."""


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

    >>> import sys
    >>> with progress(200, label="diabetes", stream=sys.stdout, num_lines=2) as on_log:
    ...     for step in range(50, 201, 50):
    ...         on_log(step, 1 / step)
    diabetes: step 100/200, loss 0.01
    diabetes: step 200/200, loss 0.005
    """
    with run_progress(num_steps, label, stream=stream, num_lines=num_lines) as on_step:
        yield lambda step, loss: on_step(step, f"loss {loss:.4g}")


@contextmanager
def run_progress(
    num_steps: int, label: str, *, stream: TextIO | None = None, num_lines: int = 10
) -> Iterator[OnStep]:
    """The same for any run, with a text of one's own for each step."""
    output: TextIO = sys.stderr if stream is None else stream
    if output.isatty() and is_installed("rich"):
        with rich_bars(output, "{task.fields[text]}") as bars:
            task = bars.add_task(label, total=num_steps, text="-")
            yield lambda step, text: bars.update(task, completed=step, text=text)
        return
    num_shown = 0

    def on_step(step: int, text: str) -> None:
        nonlocal num_shown
        due = step * num_lines // num_steps
        if due > num_shown:
            num_shown = due
            print(f"{label}: step {step}/{num_steps}, {text}", file=output, flush=True)

    yield on_step


def is_installed(name: str) -> bool:
    """Whether a package can be imported."""
    return importlib.util.find_spec(name) is not None


def rich_bars(stream: TextIO, text: str | None = None, **options: Any) -> Any:
    """The bars of one `rich.progress.Progress`, each with a text, or with the time that passed."""
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
