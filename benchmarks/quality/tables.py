"""The report of `benchmarks.bayes_quality` as tables, one a data set, a row a method; the targets;
and published figures for data sets that a CSV file may hold.
"""

import collections
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from benchmarks import table
from benchmarks.quality.methods import LAPLACE, METHODS, MODE, PLAIN, RECOMMENDED, STOPPED
from benchmarks.report import Target, render_targets

PACKAGES = ("eqxlike", "jax", "numpyro", "blackjax", "scikit-learn", "numpy", "python")
"""The packages whose versions a report contains."""

EXPLANATION = """\
Mean over the splits, and its standard error in brackets. NLL: negative log likelihood in nats for
an example, in the unit of the targets. Calibration error: for numbers, the mean difference between
the coverage and the level of central intervals, over 19 levels; for classes, the expected
calibration error with 10 bins of equal width. Coverage: the coverage of central 90% intervals; for
classes, of sets of the most probable classes whose expected probability is exactly 90%. Seconds:
the median time to fit and predict over the splits, without the compilation of the first split."""

Row = Mapping[str, Any]


def mean(row: Row, score: str) -> float:
    """The mean of a score over the splits."""
    return float(np.mean([split[score] for split in row["splits"]]))


def standard_error(row: Row, score: str) -> float:
    """The standard error of the mean, or NaN for one split."""
    values = [split[score] for split in row["splits"]]
    return float(np.std(values, ddof=1) / math.sqrt(len(values))) if len(values) > 1 else math.nan


def seconds(row: Row) -> float:
    """The time of a split."""
    return float(np.median([split["seconds"] for split in row["splits"][1:] or row["splits"]]))


def render(report: Mapping[str, Any], *, markdown: bool) -> str:
    """The tables of a report, the targets, the machine it was measured on, and the notes.

    **Arguments:**

    - `report`: as `benchmarks.bayes_quality` makes it.
    - `markdown`: whether to write Markdown rather than plain aligned text.
    """
    rows = report["rows"]
    if not rows:
        return "no methods were run"
    draw = table.markdown_table if markdown else table.text_table
    parts = []
    for data in dict.fromkeys(row["data"] for row in rows):
        own = [row for row in rows if row["data"] == data]
        first = own[0]
        title = (
            f"{data}: {first['examples']} examples, {first['features']} features, "
            f"{first['unknowns']} unknowns, {len(first['splits'])} splits"
        )
        counts = sorted(collections.Counter(first["prior_scales"]).items())
        scales = ", ".join(f"{scale:g} ({count})" for scale, count in counts)
        chosen = f"Scale of the prior, and of how many splits: {scales}."
        parts.append(f"{title}\n\n{draw(cells(own))}\n\n{chosen}")
    parts.append(EXPLANATION)
    if any(published(row["data"]) for row in rows):
        sources = [f"- {method}: {source}" for method, source in SOURCES.items()]
        parts.append("\n".join(["Published figures", "", *sources]))
    if found := targets(report):
        parts.append(render_targets(found))
    method = report["method"]
    how = f"{method['splits']} splits, a tenth of the examples to test on"
    how += ", quick settings" if method["is_quick"] else ""
    parts.append(table.describe(report, PACKAGES, how))
    notes = dict.fromkeys(note for row in rows for note in row["notes"])
    if notes:
        parts.append("\n".join(f"- {note}" for note in notes))
    return "\n\n".join(parts)


def cells(rows: Sequence[Row]) -> list[list[str]]:
    """The cells of the table of a data set, starting with the headings."""
    accuracy = "RMSE" if rows[0]["is_regression"] else "accuracy"
    lines = [["", "NLL", accuracy, "calibration error", "coverage", "seconds"]]
    for row in rows:
        scores = ("nll", "accuracy", "calibration_error", "coverage")
        lines.append(
            [row["method"], *(_cell(row, score) for score in scores), f"{seconds(row):.2f}"]
        )
    for figure in published(rows[0]["data"]):
        numbers = (f"{figure.nll:.2f}", f"{figure.rmse:.2f}")
        lines.append([f"{figure.method}, published", *numbers, "", "", ""])
    return lines


def _cell(row: Row, score: str) -> str:
    value, error = mean(row, score), standard_error(row, score)
    # Shows no more decimals than the standard error justifies.
    digits = 3 if abs(value) < 20 else 2
    return (
        f"{value:.{digits}f}" if math.isnan(error) else f"{value:.{digits}f} ({error:.{digits}f})"
    )


# --- targets ---

LEAST, MOST = 0.87, 0.93
"""The accepted coverage of 90% intervals."""

MOST_OF_MODE = 1.05
"""The largest accepted NLL of `bayes.Laplace`, relative to the NLL of its mode."""


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


# --- published figures ---


class Published(NamedTuple):
    """A figure for a data set: the mean over 20 splits with a tenth for testing."""

    method: str
    rmse: float
    nll: float


ENSEMBLES = "deep ensembles"
DROPOUT = "MC dropout"
BACKPROPAGATION = "probabilistic backpropagation"

SOURCES: Mapping[str, str] = {
    BACKPROPAGATION: "Hernández-Lobato and Adams (2015), Probabilistic Backpropagation for "
    "Scalable Learning of Bayesian Neural Networks",
    DROPOUT: "Gal and Ghahramani (2016), Dropout as a Bayesian Approximation",
    ENSEMBLES: "Lakshminarayanan, Pritzel and Blundell (2017), Simple and Scalable Predictive "
    "Uncertainty Estimation using Deep Ensembles",
}

PUBLISHED: Mapping[str, tuple[Published, ...]] = {
    "boston": (
        Published(ENSEMBLES, 3.28, 2.41),
        Published(DROPOUT, 2.97, 2.46),
        Published(BACKPROPAGATION, 3.01, 2.57),
    ),
    "concrete": (
        Published(ENSEMBLES, 6.03, 3.06),
        Published(DROPOUT, 5.23, 3.04),
        Published(BACKPROPAGATION, 5.67, 3.16),
    ),
    "energy": (
        Published(ENSEMBLES, 2.09, 1.38),
        Published(DROPOUT, 1.66, 1.99),
        Published(BACKPROPAGATION, 1.80, 2.04),
    ),
    "yacht": (
        Published(ENSEMBLES, 1.58, 1.18),
        Published(DROPOUT, 1.11, 1.55),
        Published(BACKPROPAGATION, 1.02, 1.63),
    ),
}


def published(name: str) -> tuple[Published, ...]:
    """The published figures for a data set, found by the start of its name, ignoring case."""
    return next((found for stem, found in PUBLISHED.items() if name.lower().startswith(stem)), ())
