"""Calls not in the main table: large models, other arguments, exported programs, first calls; and
memory.

Every column of a row computes the same numbers, which is checked before anything is timed.
`benchmarks.timing` describes the method. A first call, from a new function to its result, cannot be
repeated: it is timed as in `benchmarks.layer_timing`, without a compilation cache on disk. If all
rows are measured, memory and asynchrony follow. Ctrl-C prints the rows that are finished.
"""

import sys
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from benchmarks import (
    command,
    edge_arguments,
    edge_exported,
    edge_first_calls,
    edge_models,
    edge_resources,
    layer_rows,
    report,
    table,
)
from benchmarks.layer_rows import Row

NAME = "benchmarks.jit_edges"
ROUNDS = command.Rounds(default=100, quick=15)
FIRST_ROUNDS = command.Rounds(default=15, quick=2)


def all_rows() -> list[Row]:
    """All rows; warm calls come first."""
    warm = [*edge_models.rows(), *edge_arguments.rows(), *edge_exported.rows()]
    return [*warm, *edge_first_calls.rows()]


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures and prints; returns the exit status: 2 for a wrong argument, 130 after Ctrl-C."""
    options = command.parse(arguments, NAME, __doc__, ROUNDS, FIRST_ROUNDS)
    status, result = layer_rows.measure_rows(NAME, options, all_rows())
    if status == 0 and not options.rows:
        result.update(measure_resources())
        if options.json is not None:
            report.write(result, options.json)
        print(describe_resources(result))
    return status


def measure_resources() -> dict[str, Any]:
    """Measures the memory of cached partitions, and the time until a call returns."""
    returned_s, ready_s = edge_resources.asynchrony()
    return {
        "partition_bytes": {
            str(2 * depth): edge_resources.partition_bytes(depth) for depth in (2, 8, 64)
        },
        "asynchrony": {"returned_s": returned_s, "ready_s": ready_s},
    }


def describe_resources(measured: Mapping[str, Any]) -> str:
    """The output of `measure_resources` as text."""
    sizes = [
        [f"{count} arrays", f"{size:.0f}"] for count, size in measured["partition_bytes"].items()
    ]
    ready_s, returned_s = (measured["asynchrony"][name] for name in ("ready_s", "returned_s"))
    return (
        f"\nMemory that a cached partition adds to a model\n\n"
        f"{table.text_table([['', 'bytes'], *sizes])}\n\n"
        f"A call on {ready_s:.3f} s of work returned after {1e3 * returned_s:.3f} ms"
    )


if __name__ == "__main__":
    # A first call that reads its program from the disk compiles nothing. It is too late for this
    # once JAX has compiled something.
    jax.config.update("jax_enable_compilation_cache", False)
    sys.exit(main())
