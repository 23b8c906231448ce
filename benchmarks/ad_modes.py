"""Modes of differentiation on a zoo of models: which are correct, how fast, and in how much memory.

`eqxlike.ad.compare` compares all modes on each model of `benchmarks/zoo/`, in standard space and,
if its unknowns have constraints, in linked (unconstrained) space. `--peers` also times gradients by
hand-written JAX, NumPyro and PyTorch, if they are installed. The targets and their results are
printed last. Parallel branches and the memory of a deep network are measured only with the whole
zoo. Ctrl-C prints the finished rows.
"""

import dataclasses
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from benchmarks import command, report
from benchmarks.cases import find
from benchmarks.modes import enzyme, tables
from benchmarks.modes.others import measure_others
from benchmarks.modes.peer_rows import peer_rows
from benchmarks.modes.targets import targets
from benchmarks.timing import installed_version
from benchmarks.zoo import registry
from benchmarks.zoo.problem import Problem, count, in_double
from eqxlike import ad

NAME = "benchmarks.ad_modes"
ROUNDS = command.Rounds(default=30, quick=5)

MODES: Mapping[str, ad.Mode] = {
    "Reverse": ad.Reverse(),
    "Checkpointed": ad.Checkpointed(),
    "Forward": ad.Forward(),
    "Forward(64)": ad.Forward(64),
    "Auto": ad.Auto(),
}

DIFFERENCES = "FiniteDifference(4, 1e-4), float64"
DIFFERENCES_TOLERANCE = 1e-6
"""In single precision, finite differences would have almost no correct digits. The step is larger
than the default, because all models are smooth enough.
"""


def modes_for(problem: Problem) -> tuple[dict[str, ad.Mode], list[ad.ComparisonRow]]:
    """The modes to compare, by the names of their columns, and the rows of modes that fail.

    Enzyme is included if it is installed.
    """
    if installed_version("enzyme-ad") is None:
        return {**MODES}, []
    failure = enzyme.failure(problem)
    if failure is not None:
        return {**MODES}, [failure]
    return {**MODES, enzyme.MODE: ad.Enzyme()}, []


def measured(problem: Problem, rounds: int, *, with_peers: bool) -> dict[str, Any]:
    """A row of the report: a problem in all modes and, if requested, by its peers."""
    unknowns, data = problem.start()
    modes, failures = modes_for(problem)
    found = ad.compare(problem.function, unknowns, data, modes=modes, rounds=rounds).rows
    with jax.enable_x64(True):
        differences = ad.compare(
            problem.function,
            *in_double((unknowns, data)),
            modes={DIFFERENCES: ad.FiniteDifference(4, step=1e-4)},
            reference=ad.Reverse(),
            tolerance=DIFFERENCES_TOLERANCE,
            rounds=rounds,
        ).rows
    row = {
        "name": problem.name,
        "space": problem.space,
        "unknowns": count(unknowns),
        "modes": [dataclasses.asdict(each) for each in (*found, *failures, *differences)],
        "peers": [],
        "notes": [],
    }
    if with_peers:
        peers, row["notes"] = peer_rows(problem, rounds)
        row["peers"] = [dataclasses.asdict(each) for each in peers]
    return row


def main(arguments: Sequence[str] | None = None) -> int:
    """Compares and prints.

    **Returns:** the exit status: 2 for a wrong argument, 130 after Ctrl-C.
    """
    flags = {"peers": "time other libraries next to ours"}
    options = command.parse(arguments, NAME, __doc__, ROUNDS, rows="models", flags=flags)
    result = report.new_report({"rounds": options.rounds})
    for name in tables.PEERS:
        result["machine"][name] = installed_version(name)
    try:
        found = find(options.models, registry.PROBLEMS)
        problems = [each for problem in found for each in registry.in_all_spaces(problem)]
        if options.json is not None:
            report.write(result, options.json)
    except (ImportError, OSError, ValueError) as error:
        print(f"{NAME}: {error}", file=sys.stderr)
        return 2

    def one(problem: Problem) -> dict[str, Any]:
        return measured(problem, options.rounds, with_peers=options.peers)

    status = 0
    try:
        command.run(problems, result, options.json, one)
        if not options.models:
            result["others"] = measure_others(options.rounds)
        if options.json is not None:
            report.write(result, options.json)
    except KeyboardInterrupt:
        print("interrupted; these rows are finished:", file=sys.stderr)
        status = 130
    print(tables.render(result, targets(result), markdown=options.markdown))
    return status


if __name__ == "__main__":
    sys.exit(main())
