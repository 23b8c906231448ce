"""The report of `benchmarks.bayes_quality`: a table for each data set, a row for each method."""

import collections
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from benchmarks import table, targets
from benchmarks.quality.published import SOURCES, published
from benchmarks.targets import Target

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


def render(report: Mapping[str, Any], found: Sequence[Target], *, markdown: bool) -> str:
    """The tables of a report, the targets, the machine it was measured on, and the notes.

    **Arguments:**

    - `report`: the report of `benchmarks.bayes_quality`.
    - `found`: the targets of `benchmarks.quality.targets`.
    - `markdown`: whether to write Markdown instead of aligned plain text.
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
    if found:
        parts.append(targets.render(found))
    parts.append(describe(report))
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


def describe(report: Mapping[str, Any]) -> str:
    """Two lines about versions, machine and method."""
    machine, method = report["machine"], report["method"]
    versions = ", ".join(f"{name} {machine[name] or 'not installed'}" for name in PACKAGES)
    return (
        f"{versions}\n{machine['device']} ({machine['cpu']}, {machine['cores']} cores), "
        f"{machine['date']}; {method['splits']} splits, a tenth of the examples to test on"
        f"{', quick settings' if method['is_quick'] else ''}"
    )
