"""The cost of libraries built on Equinox, on eqxlike and on Equinox itself.

The programs come from `tests/downstream`, and use Lineax, Optimistix and Diffrax. Each program runs
in fresh processes, alternately on the two libraries. A process times the first call, including all
tracing and compilation, and then compiled calls. Imports are timed in the same way. JAX does not
cache programs on disk. Each pair of processes checks that both libraries compute the same numbers.
Ctrl-C prints the finished rows.
"""

import dataclasses
import functools
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from benchmarks import command, downstream_process, import_time, report, timing
from benchmarks.cases import find
from benchmarks.timing import Measurement
from tests.downstream import run

NAME = "benchmarks.downstream"
ROUNDS = command.Rounds(default=9, quick=2)

OURS, EQUINOX = "eqxlike", "Equinox"
BUILT_ON_EQUINOX = ("lineax", "optimistix", "diffrax")
LIBRARIES = {OURS: run.OURS, EQUINOX: run.EQUINOX}

IMPORT, FIRST, WARM = "Import in a fresh process", "First call", "Later calls"
TABLES = (IMPORT, FIRST, WARM)

TOLERANCE = 1e-9

PROGRAMS: Mapping[str, Sequence[str]] = {
    "linear_solves": ("solver LU", "solver CG", "solver GMRES", "operator Jacobian"),
    "nonlinear_solves": (
        "root by Newton",
        "fit by LevenbergMarquardt",
        "minimum by BFGS",
        "fixed point by iteration",
    ),
    "ode_solvers": ("Tsit5, adaptive", "Kvaerno5, adaptive"),
    "adjoints": ("RecursiveCheckpoint", "Direct", "Backsolve", "RecursiveCheckpoint, of a batch"),
    "stepping": ("dense output",),
    "events": ("a crossing",),
    "stochastic": ("EulerHeun", "neural_controlled_equation"),
    "real_data": ("network_of_continuous_depth", "rows_that_drive_an_equation"),
}


@dataclasses.dataclass(frozen=True)
class Row:
    """A row of one of the tables.

    - `table`: one of `TABLES`.
    - `topic`: the topic of the program, or the library to import in the table of imports.
    - `program`: the name of the program. Not used in the table of imports.
    """

    table: str
    topic: str
    program: str = ""

    @property
    def name(self) -> str:
        """The name that selects the row."""
        return f"{self.topic}: {self.program}" if self.program else f"import {self.topic}"


ROWS: tuple[Row, ...] = (
    *(Row(IMPORT, library) for library in BUILT_ON_EQUINOX),
    *(
        Row(table, topic, program)
        for table in (FIRST, WARM)
        for topic, programs in PROGRAMS.items()
        for program in programs
    ),
)


def in_process(library: str, topic: str, program: str) -> dict[str, Any]:
    """The result of `downstream_process.timed` in a fresh process without a cache on disk."""
    module = downstream_process.__name__
    return timing.in_process(
        "-m", module, library, topic, program, JAX_ENABLE_COMPILATION_CACHE="false"
    )


@functools.cache
def samples_of(topic: str, program: str, rounds: int) -> dict[str, list[dict[str, Any]]]:
    """The times of a program on each library, in each round.

    **Raises:** `AssertionError` if the libraries compute different numbers.
    """
    found = timing.interleaved(
        {
            column: functools.partial(in_process, library, topic, program)
            for column, library in LIBRARIES.items()
        },
        rounds,
    )
    for ours, theirs in zip(found[OURS], found[EQUINOX], strict=True):
        np.testing.assert_allclose(
            ours["sums"], theirs["sums"], rtol=TOLERANCE, err_msg=f"{topic}: {program}"
        )
    return found


def measure(row: Row, rounds: int) -> Measurement:
    """The measurement of a row. First and later calls of a program share processes."""
    if row.table == IMPORT:
        instead = "import eqxlike; eqxlike.install_as_equinox(); "
        statements = {OURS: f"{instead}import {row.topic}", EQUINOX: f"import {row.topic}"}
        calls = {
            column: functools.partial(import_time.import_s, statement)
            for column, statement in statements.items()
        }
        return import_time.measure(calls, rounds)
    times = {
        column: [
            each["first_s"] if row.table == FIRST else float(np.median(each["later_s"]))
            for each in of_column
        ]
        for column, of_column in samples_of(row.topic, row.program, rounds).items()
    }
    return timing.of_seconds(times, EQUINOX)


def main(arguments: Sequence[str] | None = None, rows: Sequence[Row] = ROWS) -> int:
    """Measures and prints. Returns 2 for a wrong argument and 130 after Ctrl-C."""
    options = command.parse(arguments, NAME, __doc__, ROUNDS)

    def measured(row: Row) -> dict[str, Any]:
        return report.row(row.name, measure(row, options.rounds), table=row.table)

    with import_time.own_bytecode():
        return command.execute(
            NAME,
            options,
            lambda: find(options.rows, rows),
            measured,
            tables=list(map(report.Table, TABLES)),
            packages=BUILT_ON_EQUINOX,
        )


if __name__ == "__main__":
    sys.exit(main())
