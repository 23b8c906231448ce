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
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks import command, report, table, targets
from benchmarks.cases import find
from benchmarks.cost import densities, ensembles, first_calls, sampling, steps
from benchmarks.cost.rows import Effort, Row
from benchmarks.cost.targets import targets as targets_of
from benchmarks.timing import installed_version
from eqxlike import bayes

NAME = "benchmarks.bayes_cost"
ROUNDS = command.Rounds(default=100, quick=5)
PEERS = ("numpyro", "blackjax")

DEFAULT = Effort(rounds=ROUNDS.default, runs=5, draws=500, steps=2000)
QUICK_ROWS = "21 unknowns|13-50-1, batch|32 examples|regression, vectorized"
"""The smallest numbers, for a quick run."""
QUICK = Effort(rounds=ROUNDS.quick, runs=1, draws=50, steps=200)


def all_rows() -> list[Row]:
    """The rows of all tables."""
    tables = (densities, steps, sampling, ensembles, first_calls)
    return [row for each in tables for row in each.rows()]


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures and prints. Returns 2 for a wrong argument and 130 after Ctrl-C."""
    options = command.parse(arguments, NAME, __doc__, ROUNDS)
    effort = (QUICK if options.quick else DEFAULT)._replace(rounds=options.rounds)
    try:
        rows = find(options.rows or (QUICK_ROWS if options.quick else ""), all_rows())
        result = new_report(effort)
        if options.json is not None:
            report.write(result, options.json)
    except (ImportError, OSError, ValueError) as error:
        print(f"{NAME}: {error}", file=sys.stderr)
        return 2
    status = 0
    try:
        with warnings.catch_warnings():
            # The table shows the results of the chains.
            warnings.simplefilter("ignore", bayes.InferenceWarning)
            command.run(rows, result, options.json, lambda row: row.measured(row, effort))
    except KeyboardInterrupt:
        print("interrupted; these rows are finished:", file=sys.stderr)
        status = 130
    print(render(result, markdown=options.markdown))
    return status


def new_report(effort: Effort) -> dict[str, Any]:
    """A report without rows."""
    result = report.new_report(effort._asdict(), folders=["eqxlike/bayes"])
    result["machine"] |= {name: installed_version(name) for name in PEERS}
    of_microseconds = (densities.ONE, densities.LOOP, steps.INFERENCE, steps.BY_HAND)
    tables = [
        {"title": title, "clocks": ["completion"], "unit": "microseconds"}
        for title in of_microseconds
    ]
    of_milliseconds = (ensembles.TABLE, first_calls.TABLE)
    tables += [
        {"title": title, "clocks": ["completion"], "unit": "milliseconds"}
        for title in of_milliseconds
    ]
    return result | {"tables": tables}


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
        parts.append(targets.render(found))
    versions = ", ".join(f"{name} {result['machine'][name]}" for name in PEERS)
    return "\n\n".join([*parts, table.render(result, markdown=markdown), versions])


if __name__ == "__main__":
    sys.exit(main())
