"""The uncertainty of each Bayesian method, compared with exact standard deviations.

Two problems have a closed form: linear regression, and regression on a hundred random features of a
Gaussian process. For logistic regression and a network of 21 unknowns, four long chains of NUTS are
the reference. Methods have their default settings, unless their name states others. The targets and
their results are printed last. Ctrl-C prints the finished rows.
"""

import argparse
import contextlib
import functools
import pathlib
import sys
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.random as jr
import numpy as np

import eqxlike
from benchmarks import command, report, table, targets
from benchmarks.cases import find
from benchmarks.exact_problems import (
    LONG,
    PROBLEMS,
    SHORT,
    Problem,
    Reference,
    reference,
    standard_deviations,
)
from benchmarks.targets import Target
from benchmarks.timing import installed_version
from eqxlike import bayes

NAME = "benchmarks.exactness"
PACKAGES = ("eqxlike", "jax", "numpyro", "blackjax", "numpy", "python")

EXPLANATION = """\
Each number is the standard deviation of the output over the networks of a method, divided by the
exact standard deviation. It is the geometric mean over 20 inputs near the data, or 20 inputs far
from the data, and over the seeds. The output is the function value, or the logit for logistic
regression. 1 is exact. Below 1 the method is overconfident. For MAP each number is 0."""

METHODS: Mapping[str, bayes.Method] = {
    "NUTS": bayes.NUTS(),
    "HMC": bayes.HMC(),
    "MCLMC": bayes.MCLMC(),
    "SGHMC": bayes.SGHMC(),
    "SGLD": bayes.SGLD(),
    "Laplace, default": bayes.Laplace(),
    "Laplace, full, width 1": bayes.Laplace(structure="full", width=1.0),
    "Laplace, Kronecker, width 1": bayes.Laplace(structure="kronecker", width=1.0),
    "Laplace, diagonal, width 1": bayes.Laplace(structure="diagonal", width=1.0),
    "Laplace, last layer, width 1": bayes.Laplace(structure="last_layer", width=1.0),
    "Pathfinder": bayes.Pathfinder(),
    "mean field": bayes.MeanField(),
    "SWAG": bayes.SWAG(),
    "early-stopped ensemble": bayes.EarlyStoppedEnsemble(members=5),
    "deep ensemble": bayes.DeepEnsemble(),
}
"""The methods in the order of the table."""

QUICK = ("NUTS", "Laplace, full, width 1", "deep ensemble")
CHAINS = bayes.NUTS | bayes.HMC | bayes.MCLMC | bayes.SGHMC | bayes.SGLD
SEEDS = 3
"""The number of seeds of each method. Chains have one seed."""

NUM_DRAWS = 1000
"""The number of networks, for methods that can draw any number."""

CLOSED, CHAINS_AGREE = 0.03, 1.01


class Row(NamedTuple):
    """The names of a method and a problem."""

    problem: str
    method: str
    is_quick: bool

    @property
    def name(self) -> str:
        """The names of the problem and the method."""
        return f"{self.problem}, {self.method}"


@contextlib.contextmanager
def noted(name: str, notes: list[str]) -> Iterator[None]:
    """Adds the first warning of `bayes.infer` to the notes, if they are empty."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    doubts = [each for each in caught if issubclass(each.category, bayes.InferenceWarning)]
    if doubts and not notes:
        notes.append(f"{name}: {doubts[0].message}")


@functools.cache
def known(name: str, is_quick: bool) -> tuple[Problem, Reference, list[str]]:
    """A problem, its reference, and a note if the chains of the reference did not converge."""
    # The programs of all problems together need more memory maps than Linux allows for a process.
    eqxlike.clear_caches()
    jax.clear_caches()
    problem, notes = PROBLEMS[name](), []
    with noted(f"{name}, reference", notes):
        exact = reference(problem, SHORT if is_quick else LONG)
    return problem, exact, notes


def measured(row: Row) -> dict[str, Any]:
    """A row of the report: the ratios of a method for each seed, near and far from the data."""
    problem, exact, of_reference = known(row.problem, row.is_quick)
    method = METHODS[row.method]
    is_kept = isinstance(method, CHAINS | bayes.DeepEnsemble | bayes.Pathfinder)
    ratios: dict[str, list[float]] = {"near": [], "far": []}
    notes: list[str] = []
    start_s = time.perf_counter()
    for seed in range(1 if row.is_quick or isinstance(method, CHAINS) else SEEDS):
        network_key, key = jr.split(jr.key(seed))
        with noted(row.name, notes):
            posterior = bayes.infer(problem.target(network_key), method, key=key, progress=False)
        for place, found in ratios.items():
            x = getattr(problem, place)
            scales = standard_deviations(posterior, x, None if is_kept else NUM_DRAWS)
            found.append(geometric_mean(scales / getattr(exact, place)))
    return {
        "problem": problem.name,
        "method": row.method,
        "is_closed_form": problem.closed_form is not None,
        "reference_r_hat": exact.r_hat,
        **ratios,
        "seconds": time.perf_counter() - start_s,
        "notes": [*of_reference, *notes],
    }


def geometric_mean(ratios: Any) -> float:
    """The geometric mean of numbers of 0 or more."""
    with np.errstate(divide="ignore"):
        return float(np.exp(np.mean(np.log(ratios))))


# --- The table ---


def render(result: Mapping[str, Any], *, markdown: bool) -> str:
    """The table of a report, the targets, the machine it was measured on, and the notes."""
    rows = result["rows"]
    if not rows:
        return "no methods were run"
    draw = table.markdown_table if markdown else table.text_table
    parts = [draw(cells(rows)), EXPLANATION]
    if found := list(targets_of(rows)):
        parts.append(targets.render(found))
    machine = result["machine"]
    versions = ", ".join(f"{name} {machine.get(name) or 'not installed'}" for name in PACKAGES)
    parts.append(
        f"{versions}\n{machine['device']} ({machine['cpu']}, {machine['cores']} cores), "
        f"{machine['date']}; {result['method']['seeds']} seeds, one of chains"
    )
    if notes := dict.fromkeys(note for row in rows for note in row["notes"]):
        parts.append("\n".join(f"- {note}" for note in notes))
    return "\n\n".join(parts)


def cells(rows: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """The cells of the table, starting with the headings."""
    problems = list(dict.fromkeys(row["problem"] for row in rows))
    found = {(row["method"], row["problem"]): row for row in rows}
    places = [(problem, place) for problem in problems for place in ("near", "far")]
    lines = [["", *(f"{problem}, {place}" for problem, place in places)]]
    for method in dict.fromkeys(row["method"] for row in rows):
        line = [method]
        for problem, place in places:
            row = found.get((method, problem))
            line.append("" if row is None else f"{geometric_mean(row[place]):.2f}")
        lines.append(line)
    return lines


def targets_of(rows: Sequence[Mapping[str, Any]]) -> Iterator[Target]:
    """NUTS reproduces the closed forms, and the chains of each reference agree."""
    errors = {
        f"{row['problem']}, {place}": abs(geometric_mean(row[place]) - 1)
        for row in rows
        if row["method"] == "NUTS" and row["is_closed_form"]
        for place in ("near", "far")
    }
    yield from targets.at_most("NUTS: difference from closed forms", CLOSED, errors)
    r_hats = {row["problem"]: row["reference_r_hat"] for row in rows if not row["is_closed_form"]}
    yield from targets.at_most("R-hat of the references", CHAINS_AGREE, r_hats)


# --- The command ---


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
    for rows in ("methods", "problems"):
        parser.add_argument(
            f"--{rows}", default="", metavar="REGEX", help=f"only {rows} whose name matches"
        )
    parser.add_argument(
        "--quick",
        action="store_true",
        help=f"one seed, short references, {', '.join(QUICK)}: for a first look, not for quoting",
    )
    parser.add_argument(
        "--markdown", action="store_true", help="print Markdown instead of plain text"
    )
    return parser.parse_args(arguments)


class Named(NamedTuple):
    """An object with a name, for `find`."""

    name: str


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the methods and prints.

    **Returns:** the exit status: 2 for a wrong argument, 130 after Ctrl-C.
    """
    options = parse(arguments)

    def begin() -> tuple[list[Row], dict[str, Any]]:
        settings = {"seeds": 1 if options.quick else SEEDS, "is_quick": options.quick}
        result = report.new_report(settings, folders=["eqxlike/bayes"])
        result["machine"] |= {name: installed_version(name) for name in PACKAGES[2:4]}
        among = QUICK if options.quick else METHODS
        methods = [each.name for each in find(options.methods, list(map(Named, among)))]
        problems = [each.name for each in find(options.problems, list(map(Named, PROBLEMS)))]
        rows = [Row(problem, method, options.quick) for problem in problems for method in methods]
        return rows, result

    return command.execute(NAME, options, begin, measured, render=render)


if __name__ == "__main__":
    sys.exit(main())
