"""The common part of the rows of all cost tables."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

from benchmarks import report
from benchmarks.cases import Case, build
from benchmarks.timing import measure


class Effort(NamedTuple):
    """The numbers of rounds, runs, draws and steps to measure.

    - `rounds`: rounds of calls that take microseconds.
    - `runs`: runs that take seconds, each with a different seed.
    - `draws`: draws of each chain, and warm-up steps before them.
    - `steps`: steps of an optimiser in a whole run.
    """

    rounds: int
    runs: int
    draws: int
    steps: int


@dataclasses.dataclass(frozen=True)
class Row:
    """A row of a table.

    - `table`: the title of the table.
    - `what`: the name of the row in the table.
    - `measured`: returns the row in the form of a report.
    """

    table: str
    what: str
    measured: Callable[["Row", Effort], dict[str, Any]]

    @property
    def name(self) -> str:
        """The name that selects the row."""
        return f"{self.table}; {self.what}"


def row_of_case(table: str, case: Case, check: Callable[[Any], None] | None = None) -> Row:
    """The row of a case, whose columns are called in turn.

    **Arguments:**

    - `check`: called with the calls by column. Raises AssertionError if their results differ.
    """

    def measured(row: Row, effort: Effort) -> dict[str, Any]:
        calls, notes = build(case)
        if check is not None:
            check(calls)
        found = measure(calls, baseline=case.baseline, rounds=effort.rounds)
        return report.row(case.name, found, notes) | {"table": table}

    return Row(table, case.name, measured)
