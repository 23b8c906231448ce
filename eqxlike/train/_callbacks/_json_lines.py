"""A line of JSON for everything that is known of a training."""

import json
import math
import os
import pathlib
import time
from typing import IO, Any

import jax

from .._run import Run
from ._callback import Callback


class JsonLines(Callback):
    """Writes a file with a JSON object in each line, which grows as the training does.

    Each has `event`, one of `"start"`, `"log"`, `"evaluate"`, `"checkpoint"` and `"end"`; `step`;
    and `seconds` since the start. A log has `loss`, and `learning_rate` where the optimiser keeps
    one; an evaluation its metrics; a checkpoint its `path`, told of once it is in its place, which
    may be some steps later. JSON has no NaN and no infinity: they are the texts `"nan"`, `"inf"`
    and `"-inf"`. Of several processes the first writes.

    **Arguments:**

    - `path`: the file; folders above it are made. Lines are added to those it has, so that a
      resumed run goes on in it. Of steps that a killed run had made since its last checkpoint
      there are lines of both: the later ones count.

    **Raises:** `OSError` at the start, where the file cannot be written.

    >>> import tempfile, pathlib
    >>> from eqxlike import train
    >>> callback = train.JsonLines(pathlib.Path(tempfile.mkdtemp()) / "run.jsonl")
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = pathlib.Path(path)
        self._file: IO[str] | None = None
        self._started = 0.0

    def on_start(self, run: Run) -> None:
        """Opens the file."""
        if jax.process_index() != 0:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self.path.open("a", encoding="utf-8")
        self._started = time.perf_counter()
        self._write("start", run, num_steps=run.num_steps)

    def on_log(self, run: Run) -> None:
        """The loss, and the learning rate."""
        rate = run.learning_rate
        self._write("log", run, loss=run.loss, **({} if rate is None else {"learning_rate": rate}))

    def on_evaluate(self, run: Run) -> None:
        """The metrics."""
        self._write("evaluate", run, metrics=dict(run.metrics))

    def on_checkpoint(self, run: Run) -> None:
        """Where it is."""
        self._write("checkpoint", run, path=str(run.checkpoint))

    def on_end(self, run: Run) -> None:
        """The last line."""
        self._write("end", run)

    def close(self) -> None:
        """Closes the file."""
        if self._file is not None:
            self._file.close()
        self._file = None

    def _write(self, event: str, run: Run, **what: Any) -> None:
        if self._file is None:
            return
        seconds = round(time.perf_counter() - self._started, 6)
        line = {"event": event, "step": run.steps, "seconds": seconds, **what}
        # One write a line, at once: a run that is killed leaves whole lines.
        self._file.write(json.dumps(_finite(line), allow_nan=False) + "\n")
        self._file.flush()


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _finite(each) for name, each in value.items()}
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
