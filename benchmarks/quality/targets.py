"""The targets of the methods on real data, and the results of one run."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from benchmarks.quality.methods import METHODS, PLAIN, STOPPED
from benchmarks.quality.tables import mean
from benchmarks.targets import Target

LEAST, MOST = 0.87, 0.93
"""The accepted coverage of 90% intervals."""

Row = Mapping[str, Any]


def targets(report: Mapping[str, Any]) -> list[Target]:
    """The targets for the rows of a report."""
    rows = report["rows"]
    ours = [row for row in rows if row["method"] in METHODS]
    return [*_beats(PLAIN, rows, ours), *_beats(STOPPED, rows, ours), *_covers(ours)]


def _beats(name: str, rows: Sequence[Row], ours: Sequence[Row]) -> Iterator[Target]:
    """On all data some method has a better NLL than a network without a prior."""
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
    yield Target(f"NLL of the best method below that of the {name} on all data", text, is_better)


def _covers(ours: Sequence[Row]) -> Iterator[Target]:
    """At least two methods' 90% intervals have that coverage on all data."""
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
