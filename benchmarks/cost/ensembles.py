"""A whole ensemble compared with one network."""

from collections.abc import Iterator
from typing import Any

import jax

from benchmarks import report
from benchmarks.cost.rows import Effort, Row
from benchmarks.cost.steps import target
from benchmarks.layer_timing import measure_first_calls
from benchmarks.timing import Call
from eqxlike import bayes

TABLE = "A whole run"

ONE = "MAP"
TOGETHER = "DeepEnsemble"
APART = "DeepEnsemble, sequential"

MEMBERS = 10
SIZES = (13, 50, "scalar")
EXAMPLES = 512


def rows() -> Iterator[Row]:
    """Steps on minibatches, and on all of the data."""
    for batch_size in (32, 128, None):
        yield _row(batch_size)


def _row(batch_size: int | None) -> Row:
    def measured(row: Row, effort: Effort) -> dict[str, Any]:
        posterior = target(SIZES, EXAMPLES)
        one = bayes.MAP(steps=effort.steps, batch_size=batch_size)
        many = bayes.DeepEnsemble(steps=effort.steps, batch_size=batch_size, members=MEMBERS)

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
            },
            baseline=ONE,
            rounds=effort.runs,
        )
        return report.row(row.what, found, []) | {"table": TABLE}

    examples = f"all {EXAMPLES}" if batch_size is None else str(batch_size)
    return Row(TABLE, f"13-50-1, {examples} examples a step", measured)
