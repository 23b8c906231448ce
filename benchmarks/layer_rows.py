"""The rows of several tables, and the command that measures them.

A row is a `Case` of `benchmarks.cases` with its table and its check. Libraries may draw different
parameters, but must compute the same outputs.
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
    """A table of rows that measure the same quantity.

    - `title`: a description of a call.
    - `clocks`: the clocks to print, "completion" or "dispatch".
    - `is_first_call`: whether each call is a first call. The builders of a row then return a
      `Prepare`.
    - `unit`: the unit of the times, one of `benchmarks.table.UNITS_US`.
    """

    title: str
    clocks: tuple[str, ...] = ("completion",)
    is_first_call: bool = False
    unit: str = "milliseconds"


@dataclasses.dataclass(frozen=True)
class Row:
    """A computation in all columns.

    - `table`: the table of the row.
    - `case`: the name, the columns and the baseline.
    - `check`: called with the output of the builders, by column. Raises AssertionError if columns
      differ.
    - `count_lines`: returns the number of lines of each column's lowered program, if it is shown.
    """

    table: Table
    case: Case
    check: Callable[[Mapping[str, Call]], None]
    count_lines: Callable[[], dict[str, int]] | None = None

    @property
    def name(self) -> str:
        """The name that selects the row: the title of the table and the name of the case."""
        return f"{self.table.title}; {self.case.name}"


def measure_rows(
    name: str, options: argparse.Namespace, among: Sequence[Row]
) -> tuple[int, dict[str, Any]]:
    """Checks, measures and prints rows.

    **Arguments:**

    - `name`: the name of the command's module.
    - `options`: the options that `command.parse` returns, with `first_rounds`.
    - `among`: the rows to choose from.

    **Returns:** the exit status (2 for a wrong argument, 130 after Ctrl-C) and the report.
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
    """A report without rows that lists the tables of `rows`."""
    method = {"rounds": options.rounds, "first_rounds": options.first_rounds}
    tables = [
        {"title": table.title, "clocks": list(table.clocks), "unit": table.unit}
        for table in dict.fromkeys(row.table for row in rows)
    ]
    return report.new_report(method) | {"tables": tables}


def _measure_row(row: Row, options: argparse.Namespace) -> dict[str, Any]:
    """Checks and measures a row, and returns it in the form of the report."""
    calls, notes = build(row.case)
    row.check(calls)
    # Without Equinox, ratios are relative to eqxlike.
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
    """Checks that the models of all columns have the same number of parameters.

    **Raises:** `AssertionError` that names the number of each column.
    """
    sizes = {column: count_parameters(call()) for column, call in calls.items()}
    if len(set(sizes.values())) > 1:
        raise AssertionError(f"the models differ in their numbers of parameters: {sizes}")


def check_first_calls(preparations: Mapping[str, Prepare]) -> None:
    """Raises `AssertionError` if the first calls of the columns return different numbers."""
    check_agreement({column: prepare() for column, prepare in preparations.items()}, times=1)
