"""The targets of the methods on real data, and the results of one run."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from benchmarks.quality.methods import LAPLACE, METHODS, MODE, PLAIN, RECOMMENDED, STOPPED
from benchmarks.quality.tables import mean
from benchmarks.targets import Target

LEAST, MOST = 0.87, 0.93
"""The accepted coverage of 90% intervals."""

MOST_OF_MODE = 1.05
"""The largest accepted NLL of `bayes.Laplace`, relative to the NLL of its mode."""

Row = Mapping[str, Any]


def targets(report: Mapping[str, Any]) -> list[Target]:
    """The targets for the rows of a report."""
    rows = report["rows"]
    ours = [row for row in rows if row["method"] in METHODS]
    return [
        *_beats(PLAIN, rows, ours),
        *_beats(STOPPED, rows, ours),
        *_covers(ours),
        *_recommends(rows),
        *_keeps_to_the_mode(rows),
    ]


def _pairs(name: str, other: str, rows: Sequence[Row]) -> dict[str, tuple[Row, Row]]:
    """The rows of two methods, for the data that have both."""
    found = {(row["method"], row["data"]): row for row in rows}
    return {
        data: (row, found[other, data])
        for (method, data), row in found.items()
        if method == name and (other, data) in found
    }


def _recommends(rows: Sequence[Row]) -> Iterator[Target]:
    """On all data, the recommended call beats early stopping in NLL and has enough coverage."""
    pairs = _pairs(RECOMMENDED, STOPPED, rows)
    if not pairs:
        return
    text = "; ".join(
        f"{data} {mean(row, 'nll'):.3f} to {mean(stopped, 'nll'):.3f}, {mean(row, 'coverage'):.3f}"
        for data, (row, stopped) in pairs.items()
    )
    yield Target(
        f"recommended call: NLL below the NLL of the {STOPPED}, coverage within {LEAST} and {MOST}",
        text,
        all(
            mean(row, "nll") < mean(stopped, "nll") and LEAST <= mean(row, "coverage") <= MOST
            for row, stopped in pairs.values()
        ),
    )


def _keeps_to_the_mode(rows: Sequence[Row]) -> Iterator[Target]:
    """`bayes.Laplace()` is never much worse than its mode in NLL, and is better on average."""
    pairs = _pairs(LAPLACE, MODE, rows)
    if not pairs:
        return
    ratios = {data: mean(row, "nll") / mean(mode, "nll") for data, (row, mode) in pairs.items()}
    average = float(np.mean(list(ratios.values())))
    text = ", ".join(f"{data} {ratio:.3f}" for data, ratio in ratios.items())
    yield Target(
        f"NLL of {LAPLACE} / {MODE}: at most {MOST_OF_MODE} on each, their mean below 1",
        f"{text}; mean {average:.3f}",
        max(ratios.values()) <= MOST_OF_MODE and average < 1,
    )


def _beats(name: str, rows: Sequence[Row], ours: Sequence[Row]) -> Iterator[Target]:
    """Some method has a better NLL than a network without a prior, on all data."""
    plain = {row["data"]: mean(row, "nll") for row in rows if row["method"] == name}
    found = {data: [row for row in ours if row["data"] == data] for data in plain}
    best = {
        data: min(of_data, key=lambda row: mean(row, "nll"))
        for data, of_data in found.items()
        if of_data
    }
    if not best:
        return
    text = "; ".join(
        f"{data} {mean(row, 'nll'):.3f} ({row['method']}) to {plain[data]:.3f}"
        for data, row in best.items()
    )
    is_better = all(mean(row, "nll") < plain[data] for data, row in best.items())
    yield Target(f"NLL of the best method below the NLL of the {name} on all data", text, is_better)


def _covers(ours: Sequence[Row]) -> Iterator[Target]:
    """The 90% intervals of at least two methods have the accepted coverage on all data."""
    if not ours:
        return
    names = list(dict.fromkeys(row["method"] for row in ours))
    all_data = list(dict.fromkeys(row["data"] for row in ours))
    inside = [
        (row["method"], row["data"]) for row in ours if LEAST <= mean(row, "coverage") <= MOST
    ]
    everywhere = [name for name in names if all((name, data) in inside for data in all_data)]
    counts = ", ".join(f"{data} {sum(each == data for _, each in inside)}" for data in all_data)
    found = f"{len(everywhere)} on all data ({', '.join(everywhere) or 'none'}); by data: {counts}"
    yield Target(
        f"coverage of 90% intervals within {LEAST} and {MOST}: at least 2 methods",
        found,
        len(everywhere) >= 2,
    )
