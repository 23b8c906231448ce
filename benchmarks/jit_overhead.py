"""The cost of a call of a compiled function: filter_jit, raw `jax.jit`, Equinox and NNX.

A check before timing ensures that all columns of a row compute the same numbers.
`benchmarks.timing` describes the method. Ctrl-C prints the finished rows.
"""

import sys
from collections.abc import Sequence

from benchmarks import cases, command

NAME = "benchmarks.jit_overhead"
ROUNDS = command.Rounds(default=200, quick=15)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures and prints. Returns 2 for a wrong argument and 130 after Ctrl-C."""
    return command.measure_cases(arguments, NAME, __doc__, ROUNDS, cases.CASES)


if __name__ == "__main__":
    sys.exit(main())
