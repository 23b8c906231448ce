"""Modes of differentiation on a zoo of models: which are correct, how fast, and in how much memory.

`eqxlike.ad.compare` compares all modes on each model of `benchmarks/zoo/`, in standard space and,
if its unknowns have constraints, in linked (unconstrained) space. `--peers` also times gradients by
hand-written JAX, NumPyro and PyTorch, if they are installed. The targets and their results are
printed last. Parallel branches and the memory of a deep network are measured only with the whole
zoo. Ctrl-C prints the finished rows.
"""

import dataclasses
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import jax

import eqxlike
from benchmarks import ad_tables, command, zoo
from benchmarks.ad_peers import eqxlike_filtered, peer_rows
from benchmarks.ad_tables import ENZYME
from benchmarks.cases import find
from benchmarks.timing import installed_version, measure
from benchmarks.zoo import bayesian_network as network
from benchmarks.zoo.networks import deep_network
from benchmarks.zoo.problem import Problem, count, in_all_spaces, in_double
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
    failure = enzyme_failure(problem)
    if failure is not None:
        return {**MODES}, [failure]
    return {**MODES, ENZYME: ad.Enzyme()}, []


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

    def select() -> list[Problem]:
        found = find(options.models, zoo.PROBLEMS)
        return [each for problem in found for each in in_all_spaces(problem)]

    def one(problem: Problem) -> dict[str, Any]:
        return measured(problem, options.rounds, with_peers=options.peers)

    def finish(result: dict[str, Any]) -> None:
        if not options.models:
            result["others"] = measure_others(options.rounds)

    return command.execute(
        NAME,
        options,
        select,
        one,
        packages=ad_tables.PACKAGES,
        finish=finish,
        render=ad_tables.render,
    )


# --- Enzyme, tried in a separate process ---
#
# If Enzyme lacks a rule, it may end the process (enzyme_ad 0.0.16 does so in a scan) or print its
# whole program. A separate process protects the measurement from both.

MOST_S = 300
BY_ENZYME = """
from benchmarks import ad_modes
ad_modes.print_enzyme({!r}, {!r})
"""


def enzyme_failure(problem: Problem) -> ad.ComparisonRow | None:
    """The row of Enzyme if it cannot differentiate the problem, or None if it can."""
    command = [sys.executable, "-c", BY_ENZYME.format(problem.name, problem.space)]
    try:
        ended = subprocess.run(command, capture_output=True, text=True, timeout=MOST_S)
    except subprocess.TimeoutExpired:
        return ad.ComparisonRow(ENZYME, "error", f"Enzyme takes more than {MOST_S} s to compile it")
    if ended.returncode == 0:
        row = ad.ComparisonRow(**json.loads(ended.stdout))
        return row if row.verdict == "error" else None
    said = [line for line in ended.stderr.splitlines() if "ERROR" in line or "Error" in line]
    why = said[-1] if said else f"exit status {ended.returncode}"
    return ad.ComparisonRow(ENZYME, "error", f"Enzyme ended its process: {why}")


def print_enzyme(name: str, space: str) -> None:
    """Prints Enzyme's row as JSON, for the problem with this name and space."""
    (named,) = (problem for problem in zoo.PROBLEMS if problem.name == name)
    (problem,) = (each for each in in_all_spaces(named) if each.space == space)
    modes = {ENZYME: ad.Enzyme()}
    unknowns, data = problem.start()
    found = ad.compare(problem.function, unknowns, data, modes=modes, reference=None, rounds=1)
    print(json.dumps(dataclasses.asdict(found.rows[0])))


# --- measurements outside the zoo: a deep network's memory, and parallel branches ---


def measure_others(rounds: int) -> dict[str, float]:
    """The measured ratios by name.

    - `checkpointed`: the temporary memory of `Checkpointed` relative to `Reverse`, for a gradient
      of a network of 64 layers.
    - `parallel primal`, `parallel gradient`: the times of the Bayesian network with parallel
      branches relative to the dense one, in the same rounds.
    """
    deep = deep_network(layers=64)
    ratio = peak_bytes(deep, ad.Checkpointed()) / peak_bytes(deep, ad.Reverse())
    return {"checkpointed": ratio, **_parallel_to_dense(rounds)}


def peak_bytes(problem: Problem, mode: ad.Mode) -> int:
    """The temporary memory of value and gradient, as estimated by XLA."""
    gradient = eqxlike.filter_value_and_grad(problem.function, mode=mode)
    compiled = eqxlike.filter_jit(gradient).lower(*problem.start()).compile()
    return compiled.memory_analysis().temp_size_in_bytes


def _parallel_to_dense(rounds: int) -> dict[str, float]:
    width, branches = network.BRANCHED
    dense = eqxlike_filtered(network.bayesian_network(width))
    parallel = eqxlike_filtered(network.parallel_network(width, branches))
    primals = {"dense": dense.primal, "parallel": parallel.primal}
    gradients = {
        "dense": lambda: dense.gradient()[0],
        "parallel": lambda: parallel.gradient()[0],
    }
    return {
        f"parallel {name}": measure(calls, baseline="dense", rounds=rounds)
        .columns["parallel"]
        .completion_ratio.median
        for name, calls in (("primal", primals), ("gradient", gradients))
    }


if __name__ == "__main__":
    sys.exit(main())
