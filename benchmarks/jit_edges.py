"""What the main table leaves out: large models, arguments of other kinds, first calls, memory.

Every column of a row computes the same numbers, which is checked before anything is timed. The
method is that of `eqxlike._timing`. A first call, from a new function to its result, cannot be
repeated: it is timed as in `benchmarks.layer_timing`, with no compilation cache on the disk. Where
all rows are measured, memory and asynchrony follow. Ctrl-C prints the rows that are finished.
"""

import sys
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from benchmarks import (
    cases,
    command,
    edge_arguments,
    edge_first_calls,
    edge_models,
    edge_resources,
    layers,
    report,
    table,
)
from benchmarks.layer_rows import Row
from eqxlike._numbers import whole_number_in

NAME = "benchmarks.jit_edges"
ROUNDS, QUICK_ROUNDS = 100, 15
FIRST_ROUNDS, QUICK_FIRST_ROUNDS = 15, 2


def all_rows() -> list[Row]:
    """Return the rows, those of warm calls first."""
    return [*edge_models.rows(), *edge_arguments.rows(), *edge_first_calls.rows()]


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print; return the exit status: 2 for a wrong argument, 130 after Ctrl-C."""
    quick = f"{QUICK_ROUNDS} rounds, {QUICK_FIRST_ROUNDS} of first calls"
    parser = command.parser(NAME, __doc__, ROUNDS, quick)
    parser.add_argument(
        "--first-rounds",
        type=whole_number_in,
        metavar="N",
        help=f"of first calls; default {FIRST_ROUNDS}",
    )
    options = parser.parse_args(arguments)
    rounds = options.rounds or (QUICK_ROUNDS if options.quick else ROUNDS)
    first_rounds = options.first_rounds or (QUICK_FIRST_ROUNDS if options.quick else FIRST_ROUNDS)

    result: dict[str, Any] = {}

    def begin() -> tuple[Sequence[Row], dict[str, Any]]:
        rows = cases.find(options.rows, all_rows())
        result.update(layers.new_report(rows, rounds, first_rounds))
        return rows, result

    def measured(row: Row) -> dict[str, Any]:
        return layers.measure_row(row, rounds, first_rounds)

    status = command.execute(NAME, options, begin, measured)
    if status == 0 and not options.rows:
        result.update(measure_resources())
        if options.json is not None:
            report.write(result, options.json)
        print(describe_resources(result))
    return status


def measure_resources() -> dict[str, Any]:
    """Measure the memory of kept partitions, and how soon a call returns."""
    returned_s, ready_s = edge_resources.asynchrony()
    return {
        "partition_bytes": {
            str(2 * depth): edge_resources.partition_bytes(depth) for depth in (2, 8, 64)
        },
        "asynchrony": {"returned_s": returned_s, "ready_s": ready_s},
    }


def describe_resources(measured: Mapping[str, Any]) -> str:
    """Return what `measure_resources` found, as text."""
    sizes = [
        [f"{count} arrays", f"{size:.0f}"] for count, size in measured["partition_bytes"].items()
    ]
    ready_s, returned_s = (measured["asynchrony"][name] for name in ("ready_s", "returned_s"))
    return (
        f"\nMemory that a kept partition adds to a model\n\n"
        f"{table.text_table([['', 'bytes'], *sizes])}\n\n"
        f"A call on {ready_s:.3f} s of work returned after {1e3 * returned_s:.3f} ms"
    )


if __name__ == "__main__":
    # A first call that reads its program from the disk compiles nothing. It is too late for this
    # once JAX has compiled something.
    jax.config.update("jax_enable_compilation_cache", False)
    sys.exit(main())
