"""Other calls: large models, other arguments, exported programs, first calls; and memory.

A check before timing ensures that all columns of a row compute the same numbers.
`benchmarks.timing` describes the method. A first call, from a new function to its result, cannot be
repeated, so `benchmarks.layer_timing` times it, without a compilation cache on disk. Memory and
asynchrony are measured if all rows are selected. Ctrl-C prints the finished rows.
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
    """All rows, starting with warm calls."""
    warm = [*edge_models.rows(), *edge_arguments.rows(), *edge_exported.rows()]
    return [*warm, *edge_first_calls.rows()]


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures and prints. Returns 2 for a wrong argument and 130 after Ctrl-C."""
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
    # With a cache on disk, a first call would compile nothing. The cache must be disabled before
    # JAX compiles its first program.
    jax.config.update("jax_enable_compilation_cache", False)
    sys.exit(main())
