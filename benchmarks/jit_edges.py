"""What the main table leaves out: large models, arguments of other kinds, first calls, memory.

Every column of a row computes the same numbers, which is checked before anything is timed. The
method is that of `eqxlike._timing`. A first call, from a new function to its result, cannot be
repeated: it is timed as in `benchmarks.layer_timing`, with no compilation cache on the disk. Where
all rows are measured, memory and asynchrony follow. Ctrl-C prints the rows that are finished.
"""

import sys
from collections.abc import Sequence
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
    table,
)
from benchmarks.layer_rows import Row

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
        type=command.positive,
        metavar="N",
        help=f"of first calls; default {FIRST_ROUNDS}",
    )
    options = parser.parse_args(arguments)
    rounds = options.rounds or (QUICK_ROUNDS if options.quick else ROUNDS)
    first_rounds = options.first_rounds or (QUICK_FIRST_ROUNDS if options.quick else FIRST_ROUNDS)

    def begin() -> tuple[Sequence[Row], dict[str, Any]]:
        rows = cases.find(options.rows, all_rows())
        return rows, layers.new_report(rows, rounds, first_rounds)

    def measured(row: Row) -> dict[str, Any]:
        return layers.measure_row(row, rounds, first_rounds)

    status = command.execute(NAME, options, begin, measured)
    if status == 0 and not options.rows:
        print(describe_resources())
    return status


def describe_resources() -> str:
    """Measure the memory of kept partitions, and how soon a call returns; return both as text."""
    sizes = [
        [f"{2 * depth} arrays", f"{edge_resources.partition_bytes(depth):.0f}"]
        for depth in (2, 8, 64)
    ]
    returned_s, ready_s = edge_resources.asynchrony()
    return (
        f"\nMemory that a kept partition adds to a model (bytes)\n\n"
        f"{table.text_table([['', 'bytes'], *sizes])}\n\n"
        f"A call on {ready_s:.3f} s of work returned after {1e3 * returned_s:.3f} ms"
    )


if __name__ == "__main__":
    # A first call that reads its program from the disk compiles nothing. It is too late for this
    # once JAX has compiled something.
    jax.config.update("jax_enable_compilation_cache", False)
    sys.exit(main())
