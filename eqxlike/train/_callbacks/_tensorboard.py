"""Curves of a training for TensorBoard."""

import os
import pathlib
import socket
import struct
import time
from types import ModuleType
from typing import IO, Any

import jax

from .._run import Run
from ._callback import Callback


class TensorBoard(Callback):
    """Writes a training as TensorBoard reads it: `tensorboard --logdir FOLDER` draws its curves.

    Each log has `train/loss`, `train/steps_per_second` since the one before, and
    `train/learning_rate` where the optimiser keeps one; each evaluation its metrics, as in
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
        self._file: IO[bytes] | None = None
        self._last = (0, 0.0)

    def on_start(self, run: Run) -> None:
        """Opens a file, in which the steps after the present one begin anew."""
        self._last = run.steps, time.perf_counter()
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
        """The loss, the learning rate, and steps a second."""
        (steps, then), now = self._last, time.perf_counter()
        self._last = run.steps, now
        per_second = (run.steps - steps) / max(now - then, 1e-9)
        values = {"train/loss": run.loss, "train/steps_per_second": per_second}
        rate = run.learning_rate
        if rate is not None:
            values["train/learning_rate"] = rate
        self._write_scalars(run.steps, values)

    def on_evaluate(self, run: Run) -> None:
        """The metrics."""
        metrics = {f"evaluate/{name}": value for name, value in run.metrics.items()}
        self._write_scalars(run.steps, metrics)

    def close(self) -> None:
        """Closes the file."""
        if self._file is not None:
            self._file.close()
        self._file = None

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
