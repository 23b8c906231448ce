"""The targets for the cost of Bayesian methods, and the results of one run."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from benchmarks import report
from benchmarks.cost import densities, ensembles, sampling, steps
from benchmarks.targets import Target, at_least, at_most

Row = Mapping[str, Any]


def targets(result: Mapping[str, Any]) -> list[Target]:
    """The targets for the rows of a report."""
    rows = result["rows"]
    found = [target for table in (densities.ONE, densities.LOOP) for target in _of(rows, table)]
    for table, column, to in (
        (steps.INFERENCE, "MeanField, local", steps.MAP),
        (steps.BY_HAND, "negative_elbo, local", steps.PLAIN),
    ):
        found += at_most(f"{table}: {column} / {to}", 2.0, _ratios(rows, table, column, to))
    rates = {row["name"]: sampling.ratio(row) for row in rows if row["table"] == sampling.TABLE}
    found += at_least("effective samples a second, to NumPyro's", 1.2, rates)
    together = _ratios(rows, ensembles.TABLE, ensembles.TOGETHER, ensembles.ONE)
    found += at_most(
        f"an ensemble of {ensembles.MEMBERS} in one batch / one network", 4.0, together
    )
    default = _ratios(rows, ensembles.TABLE, ensembles.DEFAULT, ensembles.ONE)
    name = f"an ensemble of {ensembles.MEMBERS} / one network"
    return [*found, *at_most(name, float(ensembles.MEMBERS), default)]


def _of(rows: Sequence[Row], table: str) -> Iterator[Target]:
    """The targets of one table of densities."""
    for column, to, limit in (
        (densities.OURS, densities.BY_HAND, 1.05),
        (densities.OURS_FILTERED, densities.BY_HAND, 1.05),
        (densities.OURS_VECTOR, densities.BY_HAND_VECTOR, 1.05),
        (densities.OURS, densities.NUMPYRO, 1.0),
        (densities.OURS_VECTOR, densities.NUMPYRO, 1.0),
    ):
        yield from at_most(f"{table}: {column} / {to}", limit, _ratios(rows, table, column, to))


def _ratios(rows: Sequence[Row], table: str, column: str, to: str) -> dict[str, float]:
    """The ratios of two columns, in the rows of a table that have both."""
    return {
        row["name"]: report.measurement(row, to).columns[column].completion_ratio.median
        for row in rows
        if row["table"] == table and column in row["columns"] and to in row["columns"]
    }
