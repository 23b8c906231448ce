"""Tests in a separate process whether Enzyme differentiates a problem of the zoo.

If Enzyme has no rule for an operation, it may crash the process (as enzyme_ad 0.0.16 in a scan) or
print the whole program. A separate process protects the benchmark from both.
"""

import dataclasses
import json
import subprocess
import sys
from collections.abc import Sequence

from benchmarks.zoo import registry
from benchmarks.zoo.problem import Problem
from eqxlike import ad

MODE = "Enzyme"
MOST_S = 300


def failure(problem: Problem) -> ad.ComparisonRow | None:
    """The row of Enzyme if it cannot differentiate the problem, or None if it can."""
    command = [sys.executable, "-m", "benchmarks.modes.enzyme", problem.name, problem.space]
    try:
        ended = subprocess.run(command, capture_output=True, text=True, timeout=MOST_S)
    except subprocess.TimeoutExpired:
        return ad.ComparisonRow(MODE, "error", f"Enzyme takes more than {MOST_S} s to compile it")
    if ended.returncode == 0:
        row = ad.ComparisonRow(**json.loads(ended.stdout))
        return row if row.verdict == "error" else None
    said = [line for line in ended.stderr.splitlines() if "ERROR" in line or "Error" in line]
    why = said[-1] if said else f"exit status {ended.returncode}"
    return ad.ComparisonRow(MODE, "error", f"Enzyme ended its process: {why}")


def main(arguments: Sequence[str]) -> int:
    """Prints Enzyme's row as JSON, for the problem with this name and space."""
    name, space = arguments
    named = [problem for problem in registry.PROBLEMS if problem.name == name]
    (problem,) = [
        each for one in named for each in registry.in_all_spaces(one) if each.space == space
    ]
    modes = {MODE: ad.Enzyme()}
    unknowns, data = problem.start()
    found = ad.compare(problem.function, unknowns, data, modes=modes, reference=None, rounds=1)
    print(json.dumps(dataclasses.asdict(found.rows[0])))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
