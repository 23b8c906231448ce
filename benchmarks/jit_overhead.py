"""The cost of a call of a compiled function: filter_jit, raw `jax.jit`, Equinox and NNX.

Every column of a row computes the same numbers, which is checked before anything is timed.
`benchmarks.timing` describes the method. Ctrl-C prints the rows that are finished.
"""

import sys
from collections.abc import Sequence

from benchmarks import cases, command

NAME = "benchmarks.jit_overhead"
ROUNDS = command.Rounds(default=200, quick=15)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures and prints; returns the exit status: 2 for a wrong argument, 130 after Ctrl-C."""
    return command.measure_cases(arguments, NAME, __doc__, ROUNDS, cases.CASES)


if __name__ == "__main__":
    sys.exit(main())
