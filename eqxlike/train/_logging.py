"""Callbacks that log training: `JsonLines`, `Progress` and `TensorBoard`."""

import contextlib
import json
import math
import os
import pathlib
import time
from collections.abc import Callable, Iterator, Mapping
from types import ModuleType
from typing import Any, TextIO

import jax

from .._check_numbers import positive_number
from .._runs import OnStep, run_progress
from ._callbacks import Callback
from ._checks import importing
from ._run import Run

# fmt: off
_PEAKS = {
    "GB200": 2500e12, "B200": 2250e12, "H200": 989e12, "H100 PCIe": 756e12, "H100 NVL": 835e12,
    "H100": 989e12, "A100": 312e12, "L40S": 362e12, "L40": 181e12, "L4": 121e12,
    "V100-SXM": 125e12, "V100-PCIE": 112e12, "Tesla T4": 65e12,
    "TPU v4": 275e12, "TPU v5 lite": 197e12, "TPU v5": 459e12, "TPU v6": 918e12,
}
# fmt: on
"""Peak FLOP/s of dense bfloat16 matrix products, from data sheets. The numbers for V100 and T4 are
for float16.

The keys are parts of device names. The first key that is part of the device's name is used.
"""


def _peak_of(device_kind: str) -> float | None:
    return next((peak for name, peak in _PEAKS.items() if name in device_kind), None)


class _Logger(Callback):
    """A callback that may write to a file, and that measures steps per second since the previous
    log.

    Of several processes, only the first process writes. The mean speed since the start is not used,
    because it would include the time of compilation.
    """

    _file: Any = None
    _last = (0, 0.0)
    _per_step: Mapping[str, float] = {}
    _peak_flops: float | None = None

    def _set_amounts(self, per_step: Mapping[str, float] | None, peak_flops: float | None) -> None:
        if not isinstance(per_step, Mapping | None):
            raise TypeError(
                'per_step must be a mapping from names to amounts, such as {"tokens": 16_384}; got '
                f"{per_step!r}."
            )
        self._per_step = {
            name: positive_number(amount, f"per_step[{name!r}]")
            for name, amount in (per_step or {}).items()
        }
        if peak_flops is not None:
            self._peak_flops = positive_number(peak_flops, "peak_flops")

    def on_start(self, run: Run) -> None:
        """Starts the clock."""
        self._last = run.steps, time.perf_counter()
        if "flops" in self._per_step and self._peak_flops is None:
            arrays = [each for each in jax.tree.leaves(run.state) if isinstance(each, jax.Array)]
            devices = max((each.sharding.device_set for each in arrays), key=len)
            peak = _peak_of(next(iter(devices)).device_kind)
            self._peak_flops = None if peak is None else peak * len(devices)

    def _rates(self, run: Run) -> dict[str, float]:
        """The rates since the previous log, by name.

        These are steps and other amounts per second, and `"mfu"`, the fraction of the peak FLOP/s.
        """
        (steps, then), now = self._last, time.perf_counter()
        self._last = run.steps, now
        speed = (run.steps - steps) / max(now - then, 1e-9)
        rates = {name: speed * each for name, each in {"steps": 1, **self._per_step}.items()}
        if "flops" in rates and self._peak_flops is not None:
            rates["mfu"] = rates["flops"] / self._peak_flops
        return rates

    def close(self) -> None:
        """Closes the file."""
        if self._file is not None:
            self._file.close()
        self._file = None


# --- JSON ---


class JsonLines(_Logger):
    """Appends the events of training to a file, one JSON object per line.

    Each object has `event`, `step`, and `seconds` since the start. Other entries depend on `event`:

    - `"start"` has `num_steps`, and `"end"` has no other entries.
    - `"log"` has `loss`, `aux` if the step returns a dict of numbers after the loss, and
      `learning_rate` if the optimiser's state has a learning rate.
    - `"evaluate"` has `metrics`.
    - `"checkpoint"` has `path`. This line is written when the checkpoint is complete, which may be
      some steps later.

    NaN and infinity are written as the strings `"nan"`, `"inf"` and `"-inf"`. If there are several
    processes, only the first writes.

    **Arguments:**

    - `path`: the file. Folders above it are created. A resumed run appends to the file. Steps that
      the earlier run made after its last checkpoint appear twice; use the later line.
    - `per_step`: amounts that a step processes, such as `{"tokens": 16_384, "flops": 2.4e12}`.
      Logs then have `steps_per_second`, `tokens_per_second` and so on. A step of a language model
      takes about six `"flops"` for each parameter and token; `graph.report(step, state,
      batch).flops` counts them.
    - `peak_flops`: peak FLOP/s of all devices together. If `per_step` has `"flops"`, logs have
      `mfu` (model FLOPs utilisation), the fraction of the peak. For common GPUs and TPUs the
      default is the peak in bfloat16. For other devices `mfu` is left out.

    **Raises:** when training starts, `OSError` if the file cannot be written.

    >>> import tempfile, pathlib
    >>> from eqxlike import train
    >>> callback = train.JsonLines(pathlib.Path(tempfile.mkdtemp()) / "run.jsonl")
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        per_step: Mapping[str, float] | None = None,
        peak_flops: float | None = None,
    ) -> None:
        self.path = pathlib.Path(path)
        self._started = 0.0
        self._set_amounts(per_step, peak_flops)

    def on_start(self, run: Run) -> None:
        """Opens the file."""
        if jax.process_index() != 0:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self.path.open("a", encoding="utf-8")
        super().on_start(run)
        self._started = self._last[1]
        self._write("start", run, num_steps=run.num_steps)

    def on_log(self, run: Run) -> None:
        """Writes the loss, the aux, the learning rate, and the amounts per second."""
        rate = run.learning_rate
        found: dict[str, Any] = {} if rate is None else {"learning_rate": rate}
        if run.aux:
            found["aux"] = dict(run.aux)
        if self._per_step:
            for name, value in self._rates(run).items():
                found[name if name == "mfu" else f"{name}_per_second"] = value
        self._write("log", run, loss=run.loss, **found)

    def on_evaluate(self, run: Run) -> None:
        """Writes the metrics."""
        self._write("evaluate", run, metrics=dict(run.metrics))

    def on_checkpoint(self, run: Run) -> None:
        """Writes the path of the checkpoint."""
        self._write("checkpoint", run, path=str(run.checkpoint))

    def on_end(self, run: Run) -> None:
        """Writes the last line."""
        self._write("end", run)

    def _write(self, event: str, run: Run, **what: Any) -> None:
        if self._file is None:
            return
        seconds = round(time.perf_counter() - self._started, 6)
        line = {"event": event, "step": run.steps, "seconds": seconds, **what}
        # Write and flush each line at once, so that a run that is killed leaves whole lines.
        self._file.write(json.dumps(_finite(line), allow_nan=False) + "\n")
        self._file.flush()


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _finite(each) for name, each in value.items()}
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


# --- Progress ---


class Progress(_Logger):
    """Shows the step, the loss, the learning rate, metrics, and steps per second.

    On a terminal it shows a progress bar with the remaining time if `rich` is installed. Otherwise
    it prints up to ten lines of text. It updates at each log; see `log_every` of `fit`.

    **Arguments:**

    - `label`: name of the run.
    - `stream`: output stream, standard error by default.
    - `per_step`: amounts that a step processes, such as `{"tokens": 16_384, "flops": 2.4e12}`. They
      are shown per second. A step of a language model takes about six `"flops"` for each parameter
      and token; `graph.report(step, state, batch).flops` counts them.
    - `peak_flops`: peak FLOP/s of all devices together. If `per_step` has `"flops"`, the fraction
      of the peak is shown (model FLOPs utilisation). For common GPUs and TPUs the default is the
      peak in bfloat16. For other devices the fraction is left out.

    >>> from eqxlike import train
    >>> callback = train.Progress("digits", per_step={"examples": 64})
    """

    def __init__(
        self,
        label: str = "training",
        *,
        stream: TextIO | None = None,
        per_step: Mapping[str, float] | None = None,
        peak_flops: float | None = None,
    ) -> None:
        self.label, self.stream = label, stream
        self._set_amounts(per_step, peak_flops)
        self._shown = contextlib.ExitStack()
        self._on_step: OnStep | None = None
        self._evaluation_shown = -1

    def on_start(self, run: Run) -> None:
        """Opens the display."""
        self._evaluation_shown = -1
        self._on_step = self._shown.enter_context(
            run_progress(run.num_steps, self.label, stream=self.stream)
        )
        super().on_start(run)

    def on_log(self, run: Run) -> None:
        """Updates the display."""
        self._show(run)

    def on_end(self, run: Run) -> None:
        """Shows the metrics of the last step, unless a log has already shown them."""
        if run.evaluated_at == run.steps != self._evaluation_shown:
            self._show(run, is_last=True)

    def _show(self, run: Run, is_last: bool = False) -> None:
        if self._on_step is None:
            return
        parts = [f"loss {run.loss:.4g}"]
        if run.learning_rate is not None:
            parts.append(f"rate {run.learning_rate:.3g}")
        parts += [f"{name} {value:.4g}" for name, value in [*run.aux.items(), *run.metrics.items()]]
        if run.steps > self._last[0]:
            rates = self._rates(run)
            share = rates.pop("mfu", None)
            parts += [f"{rate:.3g} {name}/s" for name, rate in rates.items()]
            parts += [] if share is None else [f"{share:.1%} of peak"]
        if self._on_step(run.steps, ", ".join(parts), is_last):
            self._evaluation_shown = run.evaluated_at

    def close(self) -> None:
        """Closes the display."""
        self._shown.close()
        self._on_step = None


@contextlib.contextmanager
def progress(
    num_steps: int, *, label: str = "training", stream: TextIO | None = None, num_lines: int = 10
) -> Iterator[Callable[[int, float], None]]:
    """Context manager that shows progress. It yields a function to pass to `fit` as `on_log`.

    **Arguments:**

    - `num_steps`: total number of steps.
    - `label`: name of the run.
    - `stream`: output stream, standard error by default. If it is a terminal and `rich` is
      installed, a progress bar is shown, otherwise lines of text.
    - `num_lines`: maximum number of lines of text, spread evenly over the steps.

    >>> import sys
    >>> with progress(200, label="diabetes", stream=sys.stdout, num_lines=2) as on_log:
    ...     for step in range(50, 201, 50):
    ...         on_log(step, 1 / step)
    diabetes: step 100/200, loss 0.01
    diabetes: step 200/200, loss 0.005
    """
    with run_progress(num_steps, label, stream=stream, num_lines=num_lines) as on_step:

        def on_log(step: int, loss: float) -> None:
            on_step(step, f"loss {loss:.4g}")

        yield on_log


# --- TensorBoard ---


class TensorBoard(_Logger):
    """Writes event files for TensorBoard: `tensorboard --logdir FOLDER` plots them.

    At each log, the callback writes `train/loss` and `train/steps_per_second`, both for the steps
    since the previous log. If the step returns a dict of numbers after the loss, the callback
    writes their means as `train/NAME`. It writes `train/learning_rate` if the optimiser's state has
    a learning rate. At each evaluation, it writes the metrics, such as `evaluate/accuracy`. Each
    record is flushed to disk at once.

    A resumed run uses the same folder. TensorBoard then hides the points that the earlier run wrote
    after the restored step. A new run in the folder of another run hides all points of that run. If
    there are several processes, only the first writes.

    **Arguments:**

    - `folder`: the folder of the event files. It is created if missing. TensorBoard plots the
      subfolders of `--logdir` together, so use one subfolder for each run.

    **Raises:** `ImportError` without tensorboardX: `pip install 'eqxlike[tensorboard]'`. When
    training starts, `OSError` if the folder cannot be written.

    >>> import tempfile
    >>> from eqxlike import train
    >>> callback = train.TensorBoard(tempfile.mkdtemp())
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        _tensorboardx()
        self.folder = pathlib.Path(folder)

    def on_start(self, run: Run) -> None:
        """Opens a new event file. TensorBoard then hides later steps of earlier files."""
        super().on_start(run)
        if jax.process_index() != 0:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        # TensorBoard reads files in the order of their names. The names need a count and the number
        # of the process, because two files may be created in the same second.
        count = len(list(self.folder.glob("events.out.tfevents.*")))
        # `SummaryWriter` is not used, because its thread hangs if the disk is full.
        prefix = str(self.folder / "events")
        self._file = _tensorboardx()[0].EventsWriter(prefix, f".{count:04d}.{os.getpid()}")
        self._write(step=run.steps + 1, session_log={"status": "START"})

    def on_log(self, run: Run) -> None:
        """Writes the loss, the aux, the learning rate, and steps per second."""
        values = {f"train/{name}": value for name, value in run.aux.items()}
        values |= {"train/loss": run.loss, "train/steps_per_second": self._rates(run)["steps"]}
        if (rate := run.learning_rate) is not None:
            values["train/learning_rate"] = rate
        self._write_scalars(run.steps, values)

    def on_evaluate(self, run: Run) -> None:
        """Writes the metrics."""
        metrics = {f"evaluate/{name}": value for name, value in run.metrics.items()}
        self._write_scalars(run.steps, metrics)

    def _write_scalars(self, step: int, values: dict[str, float]) -> None:
        pairs = [{"tag": name, "simple_value": value} for name, value in values.items()]
        self._write(step=step, summary={"value": pairs})

    def _write(self, **what: Any) -> None:
        if self._file is None:
            return
        self._file.write_event(_tensorboardx()[1].Event(wall_time=time.time(), **what))
        # Flush each record, so that it is on disk if the run is killed.
        self._file.flush()


def _tensorboardx() -> tuple[ModuleType, ModuleType]:
    """The modules that write files and define events. Raises `ImportError` if they are missing."""
    with importing("train.TensorBoard needs tensorboardX", "tensorboard"):
        from tensorboardX import event_file_writer
        from tensorboardX.proto import event_pb2
    return event_file_writer, event_pb2
