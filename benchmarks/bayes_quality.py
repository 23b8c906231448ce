"""Bayesian methods on real data: the quality and the calibration of their predictions.

All methods of `eqxlike.bayes` use the same network (a hidden layer of 50 units with ReLU), prior
and likelihood. The baselines are the network without a prior, and models of scikit-learn. The data
come from scikit-learn. `--csv` reads regressions from files instead, with the target in the last
column, and follows the protocol of published figures: 20 splits. The targets and their results are
printed last. Ctrl-C prints the finished rows.
"""

import pathlib
import sys
import time
import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.random as jr

import eqxlike
from benchmarks import command
from benchmarks.cases import find
from benchmarks.quality import methods, tables
from benchmarks.quality.baselines import prior_scale, target
from benchmarks.quality.data import SOURCES, DataSet, read_csv, scores, split
from eqxlike import bayes

NAME = "benchmarks.bayes_quality"
SPLITS, OF_CSV, OF_QUICK = 10, 20, 2


class Row(NamedTuple):
    """A method on a data set."""

    data: DataSet
    method: methods.Row

    @property
    def name(self) -> str:
        """The names of the data and the method."""
        return f"{self.data.name}, {self.method.name}"


def measured(row: Row, num_splits: int) -> dict[str, Any]:
    """A row of the report: the scores of a method on each split of the data."""
    data, method = row
    # The programs of all rows together need more memory maps than Linux allows for a process.
    eqxlike.clear_caches()
    jax.clear_caches()
    found: list[dict[str, float]] = []
    poor: list[str] = []
    scales = []
    for seed in range(num_splits):
        part = split(data, seed)
        # Not timed, because the choice depends on the data and not on the method.
        scales.append(prior_scale(part))
        start_s = time.perf_counter()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            prediction = jax.block_until_ready(method.predict(part, jr.key(seed)))
        elapsed_s = time.perf_counter() - start_s
        found.append(scores(prediction, part)._asdict() | {"seconds": elapsed_s})
        of_us = [each for each in caught if issubclass(each.category, bayes.InferenceWarning)]
        poor.extend(str(each.message) for each in of_us[:1])
    notes = []
    if poor:
        notes.append(f"{row.name}: warned on {len(poor)} of {num_splits} splits, first: {poor[0]}")
    return {
        "data": data.name,
        "method": method.name,
        "examples": len(data.x),
        "features": data.x.shape[1],
        "unknowns": bayes.Problem(target(split(data, 0), jr.key(0), scales[0])).size,
        "prior_scales": scales,
        "is_regression": data.is_regression,
        "splits": found,
        "notes": notes,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the methods and prints.

    **Returns:** the exit status: 2 for a wrong argument, 130 after Ctrl-C.
    """
    quick = f"{OF_QUICK} splits and fewer methods"
    parser = command.new_parser(NAME, __doc__, ("methods", "data"), quick)
    parser.add_argument(
        "--csv",
        type=pathlib.Path,
        metavar="PATH",
        nargs="+",
        help="read regressions from these files",
    )
    options = parser.parse_args(arguments)
    splits = OF_QUICK if options.quick else OF_CSV if options.csv else SPLITS

    def select() -> list[Row]:
        chosen = find(options.methods, methods.rows(is_quick=options.quick))
        if options.csv:
            data = find(options.data, [read_csv(path) for path in options.csv])
        else:
            data = [source.load() for source in find(options.data, SOURCES)]
        return [Row(each, method) for each in data for method in chosen]

    return command.execute(
        NAME,
        options,
        select,
        lambda row: measured(row, splits),
        method={"splits": splits, "is_quick": options.quick},
        packages=tables.PACKAGES[2:5],
        folders=["eqxlike/bayes"],
        render=tables.render,
    )


if __name__ == "__main__":
    sys.exit(main())
