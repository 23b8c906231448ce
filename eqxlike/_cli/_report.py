"""The findings of a run of the demo as plain data for JSON."""

import dataclasses
import json
import math
import os
import pathlib
import tempfile
from collections.abc import Mapping
from typing import Any

from .._timing import Column, Measurement, installed_version, machine_info
from .._version import __version__
from ._compare import Output
from ._data import CommandError
from ._evaluate import Intervals
from ._train import Training

PACKAGES = ("matplotlib", "optax", "scikit-learn")
PREDICTED = ("truth", "mean", "lower", "upper")


def report(
    outputs: Mapping[str, Output], *, stopped: str, seed: int, is_quick: bool, device: str
) -> dict[str, Any]:
    """The whole report, of plain values: rounded to six digits, None for what is NaN or infinite.

    **Arguments:**

    - `outputs`: the outputs, by name of the data set.
    - `stopped`: "finished", "interrupted" or "diverged".
    - `seed`: the seed of the run.
    - `is_quick`: whether the run was shortened.
    - `device`: the device on which it ran, in words.
    """
    versions = {name: installed_version(name) for name in PACKAGES}
    contents = {
        "stopped": stopped,
        "seed": seed,
        "quick": is_quick,
        "device": device,
        "machine": machine_info() | versions | {"eqxlike": __version__},
        "data": {name: _output(output) for name, output in outputs.items()},
    }
    return _plain(contents)


def _output(output: Output) -> dict[str, Any]:
    data, history = output.data, output.bayesian.result.history
    return {
        "examples": {"train": len(data.train), "test": len(data.test)},
        "settings": dataclasses.asdict(output.settings),
        "trainings": {name: _training(each) for name, each in output.trainings.items()},
        "metrics": {name: each.metrics for name, each in output.evaluations.items()},
        "reliability": {
            name: {field: values.tolist() for field, values in each.bins.items()}
            for name, each in output.evaluations.items()
            if not isinstance(each, Intervals)
        },
        "intervals": {
            name: {field: getattr(each, field).tolist() for field in PREDICTED}
            for name, each in output.evaluations.items()
            if isinstance(each, Intervals)
        },
        "elbo": [-loss for loss in history],
        "dispatch": {name: _measurement(each) for name, each in output.dispatch.items()},
        "seconds": output.seconds,
    }


def _training(training: Training) -> dict[str, Any]:
    result = training.result
    return {
        "steps": len(result.history),
        "planned": training.planned,
        "stopped": result.stopped,
        "message": result.message,
    }


def _measurement(measurement: Measurement) -> dict[str, Any]:
    columns = {name: _column(column) for name, column in measurement.columns.items()}
    return {"baseline": measurement.baseline, "columns": columns}


def _column(column: Column) -> dict[str, Any]:
    numbers = dataclasses.asdict(column)
    del numbers["name"], numbers["samples"]
    return numbers | {"rounds": len(column.samples.dispatch_us), "calls": column.samples.calls}


def write(contents: Mapping[str, Any], path: pathlib.Path) -> None:
    """Writes a report as JSON."""
    path.write_text(json.dumps(contents, indent=1, allow_nan=False) + "\n")


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    return value


def writable_folder(path: pathlib.Path) -> pathlib.Path:
    """Makes a folder where there is none, and makes sure that files can be written there.

    **Raises:** `CommandError` if files cannot be written there.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
        handle, probe = tempfile.mkstemp(dir=path)
        os.close(handle)
        os.unlink(probe)
    except OSError as error:
        reason = error.strerror or error
        raise CommandError(f"argument --out: cannot write to {str(path)!r}: {reason}") from None
    return path
