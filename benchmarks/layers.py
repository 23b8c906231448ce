"""What the layers of eqxlike.nn cost beside those of Equinox and NNX.

Four networks are constructed, called for the first time, called again and differentiated; deep
models are constructed, and stacks of equal layers compiled. Before anything is timed it is checked
that all libraries compute the same outputs and gradients from the same weights. Only what a
constructed model holds differs: each library draws its own initial values.

The method is that of `eqxlike._timing`, and for first calls and compilations that of
`benchmarks.layer_timing`, with no compilation cache on the disk. Ctrl-C prints the rows that are
finished.
"""

import sys
from collections.abc import Sequence
from typing import Any

import jax

from benchmarks import cases, command, layer_cases, layer_depth, layer_timing, report
from benchmarks.layer_networks import NETWORKS
from benchmarks.layer_rows import Row
from eqxlike._numbers import whole_number_in
from eqxlike._timing import measure

NAME = "benchmarks.layers"
ROUNDS, QUICK_ROUNDS = 50, 5
FIRST_ROUNDS, QUICK_FIRST_ROUNDS = 15, 2

ROWS: tuple[Row, ...] = (
    *map(layer_cases.construct, NETWORKS),
    *map(layer_cases.first_construct, NETWORKS),
    *map(layer_cases.first_call, NETWORKS),
    *map(layer_cases.compilation, NETWORKS),
    *map(layer_cases.forward, NETWORKS),
    *map(layer_cases.gradient, NETWORKS),
    layer_depth.sequential(depth=100, width=64),
    layer_depth.mlp(depth=100, width=64),
    *(layer_depth.stack(depth, width=64) for depth in (4, 16, 64)),
)


def main(arguments: Sequence[str] | None = None, rows: Sequence[Row] = ROWS) -> int:
    """Measure and print; return the exit status: 2 for a wrong argument, 130 after Ctrl-C."""
    quick = f"{QUICK_ROUNDS} rounds, {QUICK_FIRST_ROUNDS} of first calls"
    parser = command.parser(NAME, __doc__, ROUNDS, quick)
    parser.add_argument(
        "--first-rounds",
        type=whole_number_in,
        metavar="N",
        help=f"of first calls and compilations; default {FIRST_ROUNDS}",
    )
    options = parser.parse_args(arguments)
    rounds = options.rounds or (QUICK_ROUNDS if options.quick else ROUNDS)
    first_rounds = options.first_rounds or (QUICK_FIRST_ROUNDS if options.quick else FIRST_ROUNDS)

    def begin() -> tuple[Sequence[Row], dict[str, Any]]:
        return cases.find(options.rows, rows), new_report(rows, rounds, first_rounds)

    def measured(row: Row) -> dict[str, Any]:
        return measure_row(row, rounds, first_rounds)

    return command.execute(NAME, options, begin, measured)


def new_report(rows: Sequence[Row], rounds: int, first_rounds: int) -> dict[str, Any]:
    """Return a report without rows, which knows the tables that these rows stand in."""
    result = report.new_report({"rounds": rounds, "first_rounds": first_rounds})
    result["tables"] = [
        {"title": table.title, "clocks": list(table.clocks), "unit": table.unit}
        for table in dict.fromkeys(row.table for row in rows)
    ]
    return result


def measure_row(row: Row, rounds: int, first_rounds: int) -> dict[str, Any]:
    """Check and measure one row; return it as the report takes it."""
    calls, notes = cases.build(row.case)
    row.check(calls)
    # Without Equinox the ratios are to ours.
    baseline = row.case.baseline if row.case.baseline in calls else next(iter(calls))
    if row.table.is_first_call:
        times = layer_timing.measure_first_calls(calls, baseline=baseline, rounds=first_rounds)
    else:
        times = measure(calls, baseline=baseline, rounds=rounds)
    found = report.row(row.case.name, times, notes) | {"table": row.table.title}
    return found if row.count_lines is None else found | {"lines": row.count_lines()}


if __name__ == "__main__":
    # A first call that reads its program from the disk compiles nothing. It is too late for this
    # once JAX has compiled something.
    jax.config.update("jax_enable_compilation_cache", False)
    sys.exit(main())
