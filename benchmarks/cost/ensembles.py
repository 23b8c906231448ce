"""A whole ensemble compared with one network."""

from collections.abc import Iterator, Sequence
from typing import Any

import jax

from benchmarks import report
from benchmarks.cost.rows import Effort, Row
from benchmarks.cost.steps import network_name, target
from benchmarks.layer_timing import measure_first_calls
from benchmarks.timing import Call
from eqxlike import bayes

TABLE = "A whole run"

ONE = "MAP"
TOGETHER = "DeepEnsemble"
APART = "DeepEnsemble, sequential"

DEFAULT = "DeepEnsemble, default"

MEMBERS = 10
SMALL = (13, 50, "scalar")
FULL_BATCHES = (
    (SMALL, 500, 1),
    ((13, 50, 50, "scalar"), 2000, 5),
    ((13, 200, 200, "scalar"), 2000, 20),
)
"""Sizes of the layers, numbers of examples, and divisors of the number of steps."""


def rows() -> Iterator[Row]:
    """Steps on minibatches, and steps on all data."""
    for batch_size in (32, 128):
        yield _row(SMALL, 512, batch_size)
    for sizes, examples, fewer in FULL_BATCHES:
        yield _row(sizes, examples, None, fewer)


def _row(sizes: Sequence[Any], examples: int, batch_size: int | None, fewer: int = 1) -> Row:
    def measured(row: Row, effort: Effort) -> dict[str, Any]:
        posterior, steps = target(sizes, examples), effort.steps // fewer
        one = bayes.MAP(steps=steps, batch_size=batch_size)
        many = bayes.DeepEnsemble(steps=steps, batch_size=batch_size, members=MEMBERS)

        def run(method: bayes.Method, chain_method: Any) -> Call:
            return lambda: (
                bayes.infer(
                    posterior,
                    method,
                    key=jax.random.key(0),
                    progress=False,
                    chain_method=chain_method,
                ).found
            )

        found = measure_first_calls(
            {
                ONE: lambda: run(one, "vectorized"),
                TOGETHER: lambda: run(many, "vectorized"),
                APART: lambda: run(many, "sequential"),
                DEFAULT: lambda: run(many, None),
            },
            baseline=ONE,
            rounds=effort.runs,
        )
        return report.row(row.what, found, []) | {"table": TABLE}

    batch = f"all {examples}" if batch_size is None else str(batch_size)
    return Row(TABLE, f"{network_name(sizes)}, {batch} examples a step", measured)
