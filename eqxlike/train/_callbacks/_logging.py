"""Callbacks that write how training goes."""

import contextlib
import json
import math
import os
import pathlib
import socket
import struct
import time
from collections.abc import Callable, Iterator, Mapping
from types import ModuleType
from typing import IO, Any, TextIO

import jax

from ..._check_numbers import positive_number
from ..._progress import OnStep, run_progress
from .._run import Run
from ._callback import Callback


class _WithFile(Callback):
    """A callback that writes to a file, of which the first process has one."""

    _file: IO[Any] | None = None

    def close(self) -> None:
        """Closes the file."""
        if self._file is not None:
            self._file.close()
        self._file = None


# fmt: off
_PEAKS = {
    "GB200": 2500e12, "B200": 2250e12, "H200": 989e12, "H100 PCIe": 756e12, "H100 NVL": 835e12,
    "H100": 989e12, "A100": 312e12, "L40S": 362e12, "L40": 181e12, "L4": 121e12,
    "V100-SXM": 125e12, "V100-PCIE": 112e12, "Tesla T4": 65e12,
    "TPU v4": 275e12, "TPU v5 lite": 197e12, "TPU v5": 459e12, "TPU v6": 918e12,
}
# fmt: on
"""Operations a second by the data sheets, in dense products of bfloat16 (float16 for V100 and T4,
which have no bfloat16), by part of the name of the device. The first name that fits counts.
"""


def _peak_of(device_kind: str) -> float | None:
    return next((peak for name, peak in _PEAKS.items() if name in device_kind), None)


class _WithRate(Callback):
    """A callback that says how fast steps are, since the log before: since the start, compilation
    would count for long.
    """

    _last = (0, 0.0)
    _per_step: Mapping[str, float] = {}
    _peak_flops: float | None = None

    def _set_amounts(self, per_step: Mapping[str, float] | None, peak_flops: float | None) -> None:
        if not isinstance(per_step, Mapping | None):
            raise TypeError(
                'per_step must be a mapping of amounts by name, such as {"tokens": 16_384}; got '
                f"{per_step!r}."
            )
        self._per_step = {
            name: positive_number(amount, f"per_step[{name!r}]")
            for name, amount in (per_step or {}).items()
        }
        if peak_flops is not None:
            self._peak_flops = positive_number(peak_flops, "peak_flops")

    def on_start(self, run: Run) -> None:
        """Begins to count."""
        self._last = run.steps, time.perf_counter()
        if "flops" in self._per_step and self._peak_flops is None:
            arrays = [each for each in jax.tree.leaves(run.state) if isinstance(each, jax.Array)]
            devices = max((each.sharding.device_set for each in arrays), key=len)
            peak = _peak_of(next(iter(devices)).device_kind)
            self._peak_flops = None if peak is None else peak * len(devices)

    def _rates(self, run: Run) -> dict[str, float]:
        """Steps a second, the other amounts a second, and the share of the peak as `"mfu"`."""
        speed = self._steps_per_second(run)
        rates = {name: speed * each for name, each in {"steps": 1, **self._per_step}.items()}
        if "flops" in rates and self._peak_flops is not None:
            rates["mfu"] = rates["flops"] / self._peak_flops
        return rates

    def _steps_per_second(self, run: Run) -> float:
        (steps, then), now = self._last, time.perf_counter()
        self._last = run.steps, now
        return (run.steps - steps) / max(now - then, 1e-9)


# --- A line of JSON for everything that is known of a training ---


class JsonLines(_WithFile, _WithRate):
    """Writes a file with a JSON object in each line, which grows as the training does.

    Each has `event`, one of `"start"`, `"log"`, `"evaluate"`, `"checkpoint"` and `"end"`; `step`;
    and `seconds` since the start. A log has `loss`, `aux` where the loss returns numbers by name,
    and `learning_rate` where the optimiser keeps one; an evaluation its metrics; a checkpoint its
    `path`, reported once it is in its place, which may be some steps later. JSON has no NaN and no
    infinity: they are the texts `"nan"`, `"inf"` and `"-inf"`. Of several processes the first
    writes.

    **Arguments:**

    - `path`: the file; folders above it are made. Lines are added to those it has, so that a
      resumed run goes on in it. Of steps that a killed run had made since its last checkpoint
      there are lines of both: the later ones count.
    - `per_step`: amounts that a step processes, such as `{"tokens": 16_384, "flops": 2.4e12}`.
      Logs then have `steps_per_second`, `tokens_per_second` and so on, and `mfu`, the share of the
      peak. A step of a language model takes about six `"flops"` for each parameter and token;
      `graph.report(step, state, batch).flops` counts them.
    - `peak_flops`: the peak of all devices together, in operations a second. It gives the share of
      the peak that `"flops"` reach (model FLOPs utilisation). By default it is known for common
      GPUs and TPUs, in bfloat16; for other devices the share is left out.

    **Raises:** `OSError` at the start, where the file cannot be written.

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
        """The loss, the aux, and the learning rate."""
        rate = run.learning_rate
        found: dict[str, Any] = {} if rate is None else {"learning_rate": rate}
        if run.aux:
            found["aux"] = dict(run.aux)
        if self._per_step:
            for name, value in self._rates(run).items():
                found[name if name == "mfu" else f"{name}_per_second"] = value
        self._write("log", run, loss=run.loss, **found)

    def on_evaluate(self, run: Run) -> None:
        """The metrics."""
        self._write("evaluate", run, metrics=dict(run.metrics))

    def on_checkpoint(self, run: Run) -> None:
        """Where it is."""
        self._write("checkpoint", run, path=str(run.checkpoint))

    def on_end(self, run: Run) -> None:
        """The last line."""
        self._write("end", run)

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


# --- How far training is, how fast, and how long it will take ---


class Progress(_WithRate):
    """Shows the step, the loss, the learning rate, metrics, and steps a second since the last log.

    A terminal gets a bar with the time that is left, if `rich` is installed; anything else gets
    lines of text. It is shown again at each log: `fit(..., log_every=)` says how often that is.

    **Arguments:**

    - `label`: what is trained.
    - `stream`: where to write, standard error by default.
    - `num_lines`: the most lines of text, spread evenly over the steps.
    - `per_step`: amounts that a step processes, such as `{"tokens": 16_384, "flops": 2.4e12}`.
      Each is shown by the second. A step of a language model takes about six `"flops"` for each
      parameter and token; `graph.report(step, state, batch).flops` counts them.
    - `peak_flops`: the peak of all devices together, in operations a second. It gives the share of
      the peak that `"flops"` reach (model FLOPs utilisation). By default it is known for common
      GPUs and TPUs, in bfloat16; for other devices the share is left out.

    >>> from eqxlike import train
    >>> callback = train.Progress("digits", per_step={"examples": 64})
    """

    def __init__(
        self,
        label: str = "training",
        *,
        stream: TextIO | None = None,
        num_lines: int = 10,
        per_step: Mapping[str, float] | None = None,
        peak_flops: float | None = None,
    ) -> None:
        self.label, self.stream, self.num_lines = label, stream, num_lines
        self._set_amounts(per_step, peak_flops)
        self._shown = contextlib.ExitStack()
        self._on_step: OnStep | None = None
        self._evaluation_shown = -1

    def on_start(self, run: Run) -> None:
        """Shows a bar, where there is to be one."""
        self._evaluation_shown = -1
        self._on_step = self._shown.enter_context(
            run_progress(run.num_steps, self.label, stream=self.stream, num_lines=self.num_lines)
        )
        super().on_start(run)

    def on_log(self, run: Run) -> None:
        """Says how far it is."""
        self._show(run)

    def on_end(self, run: Run) -> None:
        """Shows the metrics of the last step, unless a log has shown them."""
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
        """Takes the bar away."""
        self._shown.close()
        self._on_step = None


@contextlib.contextmanager
def progress(
    num_steps: int, *, label: str = "training", stream: TextIO | None = None, num_lines: int = 10
) -> Iterator[Callable[[int, float], None]]:
    """Shows how far training is; gives the function to pass to `fit` as `on_log`.

    **Arguments:**

    - `num_steps`: what counts as done.
    - `label`: what is trained.
    - `stream`: where to write, standard error by default. A terminal gets a bar if `rich` is
      installed, anything else lines of text.
    - `num_lines`: the most lines, spread evenly over the steps, however often it is called.

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


# --- Curves of a training for TensorBoard ---


class TensorBoard(_WithFile, _WithRate):
    """Writes a training as TensorBoard reads it: `tensorboard --logdir FOLDER` draws its curves.

    Each log has `train/loss`, `train/NAME` for each number that the loss returns by name,
    `train/steps_per_second` since the one before, and `train/learning_rate` where the optimiser
    keeps one; each evaluation its metrics, as in
    `evaluate/accuracy`. They are on the disk at once: a run that is killed keeps them.

    A resumed run goes on in the same folder. What a run had written there of steps after those it
    is resumed from is no longer drawn, nor is another run's, whose place it takes. Of several
    processes the first writes.

    **Arguments:**

    - `folder`: made where it is not there; a folder for each run, side by side in one, are drawn
      together.

    **Raises:** `ImportError` without tensorboardX: `pip install 'eqxlike[tensorboard]'`. When
    training starts, `OSError` where the folder cannot be written.

    >>> import tempfile
    >>> from eqxlike import train
    >>> callback = train.TensorBoard(tempfile.mkdtemp())
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        _tensorboardx()
        self.folder = pathlib.Path(folder)

    def on_start(self, run: Run) -> None:
        """Opens a file, in which the steps after the present one begin again."""
        super().on_start(run)
        if jax.process_index() != 0:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        # They are read in the order of their names, and two may begin in the same second.
        count = len(list(self.folder.glob("events.out.tfevents.*")))
        name = f"events.out.tfevents.{int(time.time())}.{socket.gethostname()}.{count:04d}"
        self._file = (self.folder / name).open("xb")
        self._write(file_version="brain.Event:2")
        self._write(step=run.steps + 1, session_log={"status": "START"})

    def on_log(self, run: Run) -> None:
        """The loss, the aux, the learning rate, and steps a second."""
        values = {f"train/{name}": value for name, value in run.aux.items()}
        values |= {"train/loss": run.loss, "train/steps_per_second": self._steps_per_second(run)}
        rate = run.learning_rate
        if rate is not None:
            values["train/learning_rate"] = rate
        self._write_scalars(run.steps, values)

    def on_evaluate(self, run: Run) -> None:
        """The metrics."""
        metrics = {f"evaluate/{name}": value for name, value in run.metrics.items()}
        self._write_scalars(run.steps, metrics)

    def _write_scalars(self, step: int, values: dict[str, float]) -> None:
        pairs = [{"tag": name, "simple_value": value} for name, value in values.items()]
        self._write(step=step, summary={"value": pairs})

    def _write(self, **what: Any) -> None:
        if self._file is None:
            return
        event_pb2, record_writer = _tensorboardx()
        event = event_pb2.Event(wall_time=time.time(), **what).SerializeToString()
        length = struct.pack("<Q", len(event))
        checksums = [
            struct.pack("<I", record_writer.masked_crc32c(part)) for part in (length, event)
        ]
        # One write a record, at once: a run that is killed leaves whole records.
        self._file.write(length + checksums[0] + event + checksums[1])
        self._file.flush()


def _tensorboardx() -> tuple[ModuleType, ModuleType]:
    """What builds the records that TensorBoard reads, and their checksums.

    **Raises:** `ImportError`, with what to install.
    """
    try:
        from tensorboardX import record_writer
        from tensorboardX.proto import event_pb2
    except ImportError as error:
        raise ImportError(
            "Files for TensorBoard are made by tensorboardX: `pip install 'eqxlike[tensorboard]'`."
        ) from error
    return event_pb2, record_writer
