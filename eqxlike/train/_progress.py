"""How far training is, and the loss."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO

from .._progress import run_progress


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
