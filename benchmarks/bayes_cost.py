"""The cost of Bayesian methods, each compared with its limit.

- Value and gradient of a posterior, compared with a hand-written density and NumPyro's density.
- A step of variational inference, compared with a plain training step.
- NUTS, compared with NumPyro's NUTS in effective samples a second, over several seeds.
- An ensemble, compared with one network.
- The first call of each method, compared with hand-written programs in CPU time.

A check ensures that all densities return the same numbers. Only first calls include compilation.
Compare ratios within one run only. The targets and their results are printed last. Ctrl-C prints
the finished rows.
"""

import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from benchmarks import command, report, table
from benchmarks.cases import find
from benchmarks.cost import densities, sampling, steps
from eqxlike import bayes

NAME = "benchmarks.bayes_cost"
ROUNDS = command.Rounds(default=100, quick=5)
PEERS = ("numpyro", "blackjax")

DEFAULT = {"runs": 5, "draws": 500, "steps": 2000}
"""The numbers of runs that take seconds, each with its own seed; of draws of each chain, after as
many warm-up steps; and of steps of an optimiser in a whole run.
"""

QUICK = {"runs": 1, "draws": 50, "steps": 200}
QUICK_ROWS = "21 unknowns|13-50-1, batch|32 examples|regression, vectorized"
"""The smallest numbers, for a quick run."""

TABLES = (
    *(densities.ONE, densities.LOOP, steps.INFERENCE, steps.BY_HAND),
    *(steps.RUN, steps.FIRST_CALL),
)


def all_rows() -> list[Any]:
    """The rows of all tables."""
    return [
        *densities.rows(),
        *steps.step_rows(),
        *sampling.rows(),
        *steps.run_rows(),
        *steps.first_call_rows(),
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures and prints. Returns 2 for a wrong argument and 130 after Ctrl-C."""
    options = command.parse(arguments, NAME, __doc__, ROUNDS)
    effort = QUICK if options.quick else DEFAULT
    vars(options).update(effort)

    pattern = options.rows or (QUICK_ROWS if options.quick else "")
    with warnings.catch_warnings():
        # The table shows the results of the chains.
        warnings.simplefilter("ignore", bayes.InferenceWarning)
        return command.execute(
            NAME,
            options,
            lambda: find(pattern, all_rows()),
            lambda row: row.measured(options),
            method={"rounds": options.rounds} | effort,
            tables=TABLES,
            packages=PEERS,
            folders=["eqxlike/bayes"],
            render=render,
        )


def render(result: Mapping[str, Any], *, markdown: bool) -> str:
    """The tables of a report, the targets, and the machine it was measured on."""
    parts = []
    chains = [row for row in result["rows"] if row["table"] == sampling.TABLE]
    if chains:
        draw = table.markdown_table if markdown else table.text_table
        method = result["method"]
        title = (
            f"{sampling.TABLE}: {sampling.CHAINS} chains, or as many as the row says, of so many "
            f"draws after as many steps, {method['runs']} seeds; ESS and R-hat of predictions at "
            f"{sampling.INPUTS} inputs; gradients count for draws alone, and steps of the warm-up "
            "count as draws do"
        )
        parts.append(f"{title}\n\n{draw(sampling.cells(chains))}")
    if found := targets_of(result):
        parts.append(report.render_targets(found))
    parts.append(table.render(result, markdown=markdown))
    return "\n\n".join([*parts, table.versions(result, PEERS)])


# --- targets ---


def targets_of(result: Mapping[str, Any]) -> list[report.Target]:
    """The targets for the rows of a report."""
    rows = result["rows"]
    found = [*_of(rows, densities.ONE.title), *_of(rows, densities.LOOP.title)]
    for title, column, to in (
        (steps.INFERENCE.title, "MeanField, local", steps.MAP),
        (steps.BY_HAND.title, "negative_elbo, local", steps.PLAIN),
    ):
        found += report.at_most(f"{title}: {column} / {to}", 2.0, _ratios(rows, title, column, to))
    rates = {row["name"]: sampling.ratio(row) for row in rows if row["table"] == sampling.TABLE}
    found += report.at_least("effective samples a second, to NumPyro's", 1.2, rates)
    together = _ratios(rows, steps.RUN.title, steps.TOGETHER, steps.MAP)
    found += report.at_most(
        f"an ensemble of {steps.MEMBERS} in one batch / one network", 4.0, together
    )
    default = _ratios(rows, steps.RUN.title, steps.DEFAULT, steps.MAP)
    name = f"an ensemble of {steps.MEMBERS} / one network"
    return [*found, *report.at_most(name, float(steps.MEMBERS), default)]


def _of(rows: Sequence[Mapping[str, Any]], title: str) -> Iterator[report.Target]:
    """The targets of one table of densities."""
    for column, to, limit in (
        (densities.OURS, densities.BY_HAND, 1.05),
        (densities.OURS_FILTERED, densities.BY_HAND, 1.05),
        (densities.OURS_VECTOR, densities.BY_HAND_VECTOR, 1.05),
        (densities.OURS, densities.NUMPYRO, 1.0),
        (densities.OURS_VECTOR, densities.NUMPYRO, 1.0),
    ):
        ratios = _ratios(rows, title, column, to)
        yield from report.at_most(f"{title}: {column} / {to}", limit, ratios)


def _ratios(
    rows: Sequence[Mapping[str, Any]], title: str, column: str, to: str
) -> dict[str, float]:
    """The ratios of two columns, in the rows of a table that have both."""
    return {
        row["name"]: report.measurement(row, to).columns[column].completion_ratio.median
        for row in rows
        if row["table"] == title and column in row["columns"] and to in row["columns"]
    }


if __name__ == "__main__":
    sys.exit(main())
