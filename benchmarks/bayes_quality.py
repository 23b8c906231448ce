"""Bayesian methods on real data: the quality and the calibration of their predictions.

All methods of `eqxlike.bayes` use the same network (a hidden layer of 50 units with ReLU), prior
and likelihood. The baselines are the network without a prior, and models of scikit-learn. The data
come from scikit-learn. `--csv` reads regressions from files instead, with the target in the last
column, and follows the protocol of published figures: 20 splits. The targets and their results are
printed last. Ctrl-C prints the finished rows.
"""

import argparse
import pathlib
import sys
import time
import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.random as jr

import eqxlike
from benchmarks import command, report
from benchmarks.cases import find
from benchmarks.quality import methods, tables
from benchmarks.quality.data import SOURCES, DataSet, read_csv, split
from benchmarks.quality.network import prior_scale, target
from benchmarks.quality.scores import scores
from benchmarks.quality.targets import targets
from benchmarks.timing import installed_version
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


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The options of the command."""
    parser = argparse.ArgumentParser(
        prog=f"python -m {NAME}",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--json", type=pathlib.Path, metavar="FILE", help="write all numbers to FILE"
    )
    for rows in ("methods", "data"):
        parser.add_argument(
            f"--{rows}", default="", metavar="REGEX", help=f"only {rows} whose name matches"
        )
    parser.add_argument(
        "--csv",
        type=pathlib.Path,
        metavar="PATH",
        nargs="+",
        help="read regressions from these files",
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help=f"{OF_QUICK} splits and fewer methods: for a first look, not for quoting",
    )
    parser.add_argument(
        "--markdown", action="store_true", help="print Markdown instead of plain text"
    )
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the methods and prints.

    **Returns:** the exit status: 2 for a wrong argument, 130 after Ctrl-C.
    """
    options = parse(arguments)
    splits = OF_QUICK if options.quick else OF_CSV if options.csv else SPLITS
    result = report.new_report(
        {"splits": splits, "is_quick": options.quick}, folders=["eqxlike/bayes"]
    )
    result["machine"] |= {name: installed_version(name) for name in tables.PACKAGES[2:5]}
    try:
        chosen = find(options.methods, methods.rows(is_quick=options.quick))
        if options.csv:
            data = find(options.data, [read_csv(path) for path in options.csv])
        else:
            data = [source.load() for source in find(options.data, SOURCES)]
        if options.json is not None:
            report.write(result, options.json)
    except (ImportError, OSError, ValueError) as error:
        print(f"{NAME}: {error}", file=sys.stderr)
        return 2
    rows = [Row(each, method) for each in data for method in chosen]
    status = 0
    try:
        command.run(rows, result, options.json, lambda row: measured(row, splits))
    except KeyboardInterrupt:
        print("interrupted; these rows are finished:", file=sys.stderr)
        status = 130
    print(tables.render(result, targets(result), markdown=options.markdown))
    return status


if __name__ == "__main__":
    sys.exit(main())
