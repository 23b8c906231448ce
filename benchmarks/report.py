"""The results of a run of a benchmark as plain data for JSON, and back; and the targets that it
reaches.
"""

import dataclasses
import json
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

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


@dataclasses.dataclass(frozen=True)
class Table:
    """A table of rows that measure the same quantity.

    - `title`: what one call does.
    - `clocks`: the clocks to print, of "completion" and "dispatch".
    - `is_first_call`: whether each call is of a new function; the builders of a row's columns then
      make a `timing.Prepare`.
    - `unit`: the unit of the times, one of `benchmarks.table.UNITS_US`.
    """

    title: str
    clocks: tuple[str, ...] = ("completion",)
    is_first_call: bool = False
    unit: str = "milliseconds"


def new_report(
    method: Mapping[str, Any],
    tables: Sequence[Table] = (),
    *,
    packages: Sequence[str] = (),
    folders: Sequence[str] = ages.FOLDERS,
) -> dict[str, Any]:
    """A report without rows.

    **Arguments:**

    - `method`: the settings of the measurement, such as the number of rounds.
    - `tables`: the tables of the rows; by default one without a title.
    - `packages`: further packages whose versions belong to the report.
    - `folders`: the folders of the repository that are measured.
    """
    versions = {name: installed_version(name) for name in (*PEERS, *packages)}
    machine = machine_info() | {"eqxlike": eqxlike.__version__} | versions
    parts = {"method": dict(method), "is_complete": False, "rows": []}
    described = [
        {"title": each.title, "clocks": list(each.clocks), "unit": each.unit} for each in tables
    ]
    named = {"tables": described} if tables else {}
    return {"machine": machine} | ages.measured(folders) | parts | named


def row(
    name: str, measurement: Measurement, notes: Sequence[str] = (), table: str | None = None
) -> dict[str, Any]:
    """One row of a report, with the title of its table if the report has several."""
    found = {
        "name": name,
        "baseline": measurement.baseline,
        "notes": list(notes),
        "columns": {name: _column(column) for name, column in measurement.columns.items()},
    }
    return found if table is None else found | {"table": table}


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


# --- targets ---


class Target(NamedTuple):
    """A target, the result, and whether the result reaches the target."""

    aim: str
    found: str
    is_reached: bool


def at_most(aim: str, limit: float, found: Mapping[str, float]) -> Iterator[Target]:
    """Yields the target that no number is above the limit, if there are numbers."""
    if found:
        worst = max(found, key=lambda name: found[name])
        text = _with_median(worst, found)
        yield Target(f"{aim}: at most {limit:g}", text, found[worst] <= limit)


def at_least(aim: str, limit: float, found: Mapping[str, float]) -> Iterator[Target]:
    """Yields the target that no number is below the limit, if there are numbers."""
    if found:
        worst = min(found, key=lambda name: found[name])
        text = _with_median(worst, found)
        yield Target(f"{aim}: at least {limit:g}", text, found[worst] >= limit)


def render_targets(found: Sequence[Target]) -> str:
    """A heading, and a line for each target."""
    lines = [
        f"- {'reached' if each.is_reached else 'missed'}: {each.aim}: {each.found}"
        for each in found
    ]
    return "\n".join(["Targets", "", *lines])


def _with_median(worst: str, found: Mapping[str, float]) -> str:
    numbers = sorted(found.values())
    middle = f", median {numbers[len(numbers) // 2]:.2f}" if len(numbers) > 2 else ""
    return f"{found[worst]:.2f} ({worst}){middle}"
