"""The rows of several tables, and the way from them to a report.

A row is a `Case`, as in `benchmarks.cases`, with its table and its own
check: libraries may draw different parameters, but must compute the same outputs.
"""

import argparse
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from benchmarks import command, report
from benchmarks.cases import Case, build, check_agreement, find
from benchmarks.layer_timing import Prepare, measure_first_calls
from benchmarks.timing import Call, measure


@dataclasses.dataclass(frozen=True)
class Table:
    """A table, whose rows measure the same thing.

    - `title`: what one call does.
    - `clocks`: the clocks to print, of "completion" and "dispatch".
    - `is_first_call`: whether each call is of a new function; the builders of a row's columns then
      make a `Prepare`.
    - `unit`: the unit of the times, one of `benchmarks.table.UNITS_US`.
    """

    title: str
    clocks: tuple[str, ...] = ("completion",)
    is_first_call: bool = False
    unit: str = "milliseconds"


@dataclasses.dataclass(frozen=True)
class Row:
    """One piece of work in all columns.

    - `table`: the table of the row.
    - `case`: its name, its columns and the baseline.
    - `check`: takes what the columns built; raises AssertionError unless they do the same.
    - `count_lines`: returns the lines of each column's lowered program, if they matter.
    """

    table: Table
    case: Case
    check: Callable[[Mapping[str, Call]], None]
    count_lines: Callable[[], dict[str, int]] | None = None

    @property
    def name(self) -> str:
        """The name to select the row by: the name of the table, then of the case."""
        return f"{self.table.title}; {self.case.name}"


def measure_rows(
    name: str, options: argparse.Namespace, among: Sequence[Row]
) -> tuple[int, dict[str, Any]]:
    """Checks and measures rows, and prints them.

    **Arguments:**

    - `name`: the name of the command's module.
    - `options`: the options as `command.parse` returns them, with `first_rounds`.
    - `among`: the rows to choose from.

    **Returns:** the exit status, 2 for a wrong argument and 130 after Ctrl-C, and the report.
    """
    result: dict[str, Any] = {}

    def begin() -> tuple[Sequence[Row], dict[str, Any]]:
        rows = find(options.rows, among)
        result.update(_new_report(rows, options))
        return rows, result

    def measured(row: Row) -> dict[str, Any]:
        return _measure_row(row, options)

    return command.execute(name, options, begin, measured), result


def _new_report(rows: Sequence[Row], options: argparse.Namespace) -> dict[str, Any]:
    """A report without rows, with the tables of these rows."""
    method = {"rounds": options.rounds, "first_rounds": options.first_rounds}
    tables = [
        {"title": table.title, "clocks": list(table.clocks), "unit": table.unit}
        for table in dict.fromkeys(row.table for row in rows)
    ]
    return report.new_report(method) | {"tables": tables}


def _measure_row(row: Row, options: argparse.Namespace) -> dict[str, Any]:
    """Checks and measures one row; returns it in the form of the report."""
    calls, notes = build(row.case)
    row.check(calls)
    # Without Equinox, ratios are taken to ours.
    baseline = row.case.baseline if row.case.baseline in calls else next(iter(calls))
    if row.table.is_first_call:
        times = measure_first_calls(calls, baseline=baseline, rounds=options.first_rounds)
    else:
        times = measure(calls, baseline=baseline, rounds=options.rounds)
    found = report.row(row.case.name, times, notes) | {"table": row.table.title}
    return found if row.count_lines is None else found | {"lines": row.count_lines()}


def count_parameters(tree: Any) -> int:
    """The number of parameters of a model of any library."""
    leaves = jax.tree_util.tree_leaves(tree)
    return sum(leaf.size for leaf in leaves if isinstance(leaf, jax.Array))


def check_sizes(calls: Mapping[str, Call]) -> None:
    """Raises unless the models of all columns have the same number of parameters.

    **Raises:** `AssertionError` with the number of each column.
    """
    sizes = {column: count_parameters(call()) for column, call in calls.items()}
    if len(set(sizes.values())) > 1:
        raise AssertionError(f"the models differ in their numbers of parameters: {sizes}")


def check_first_calls(preparations: Mapping[str, Prepare]) -> None:
    """Raises unless the first calls of all columns return the same numbers."""
    check_agreement({column: prepare() for column, prepare in preparations.items()}, times=1)
