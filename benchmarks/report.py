"""Converts the results of a benchmark to plain data for JSON, and back."""

import dataclasses
import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import eqxlike
from benchmarks import ages
from benchmarks.timing import (
    Column,
    Measurement,
    Samples,
    installed_version,
    machine_info,
    summarise,
)

PEERS = ("equinox", "flax", "optax")


def new_report(method: Mapping[str, Any], folders: Sequence[str] = ages.FOLDERS) -> dict[str, Any]:
    """A report without rows.

    **Arguments:**

    - `method`: the settings of the measurement, such as the number of rounds.
    - `folders`: the folders of the repository that are measured.
    """
    peers = {name: installed_version(name) for name in PEERS}
    machine = machine_info() | {"eqxlike": eqxlike.__version__} | peers
    parts = {"method": dict(method), "is_complete": False, "rows": []}
    return {"machine": machine} | ages.measured(folders) | parts


def row(name: str, measurement: Measurement, notes: Sequence[str]) -> dict[str, Any]:
    """One row of a report."""
    return {
        "name": name,
        "baseline": measurement.baseline,
        "notes": list(notes),
        "columns": {name: _column(column) for name, column in measurement.columns.items()},
    }


def measurement(row: Mapping[str, Any], baseline: str | None = None) -> Measurement:
    """The measurement of a row, with ratios to `baseline` if given.

    **Raises:** `ValueError` if the row has no such column.
    """
    to: str = baseline or row["baseline"]
    if to not in row["columns"]:
        columns = "; ".join(row["columns"])
        raise ValueError(f"row {row['name']!r} has no column {to!r}; it has {columns}")
    samples = {
        name: Samples(
            tuple(column["samples"]["dispatch_us"]),
            tuple(column["samples"]["completion_us"]),
            column["samples"]["calls"],
        )
        for name, column in row["columns"].items()
    }
    return summarise(samples, to)


def write(report: Mapping[str, Any], path: pathlib.Path) -> None:
    """Writes a report as JSON. Creates the folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=1) + "\n")


def _column(column: Column) -> dict[str, Any]:
    """A column as plain data. Times are rounded to nanoseconds and ratios to four digits."""
    numbers = dataclasses.asdict(column)
    del numbers["name"]
    return _rounded(numbers, 4)


def _rounded(value: Any, digits: int) -> Any:
    if isinstance(value, dict):
        return {key: _rounded(item, digits) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_rounded(item, digits) for item in value]
    return round(value, digits) if isinstance(value, float) else value
