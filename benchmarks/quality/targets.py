"""What the methods are to reach on real data, and what they did in one run."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from benchmarks.modes.targets import Target
from benchmarks.quality.methods import METHODS, PLAIN
from benchmarks.quality.tables import mean

LEAST, MOST = 0.87, 0.93
"""The bounds of what covers nine tenths."""

Row = Mapping[str, Any]


def targets(report: Mapping[str, Any]) -> list[Target]:
    """The targets that the rows of a report speak of."""
    rows = report["rows"]
    ours = [row for row in rows if row["method"] in METHODS]
    return [*_beats_plain(rows, ours), *_covers(ours)]


def _beats_plain(rows: Sequence[Row], ours: Sequence[Row]) -> Iterator[Target]:
    plain = {row["data"]: mean(row, "nll") for row in rows if row["method"] == PLAIN}
    best = {
        data: min((row for row in ours if row["data"] == data), key=lambda row: mean(row, "nll"))
        for data in plain
        if any(row["data"] == data for row in ours)
    }
    if not best:
        return
    found = "; ".join(
        f"{data} {mean(row, 'nll'):.3f} ({row['method']}) to {plain[data]:.3f}"
        for data, row in best.items()
    )
    is_better = all(mean(row, "nll") < plain[data] for data, row in best.items())
    yield Target("the best method's NLL is below the plain network's on all data", found, is_better)


def _covers(ours: Sequence[Row]) -> Iterator[Target]:
    """That intervals of 90% cover as much, by at least two methods on all data."""
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
