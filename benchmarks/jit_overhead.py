"""What a call of a compiled function costs: filter_jit beside raw `jax.jit`, Equinox and NNX.

Every column of a row computes the same numbers, which is checked before anything is timed. The
method is that of `eqxlike._timing`. Ctrl-C prints the rows that are finished.
"""

import sys
from collections.abc import Sequence
from typing import Any

from benchmarks import cases, command, report
from eqxlike._timing import measure

NAME = "benchmarks.jit_overhead"
ROUNDS = 200
QUICK_ROUNDS = 15


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print; return the exit status: 2 for a wrong argument, 130 after Ctrl-C."""
    parser = command.parser(NAME, __doc__, ROUNDS, f"{QUICK_ROUNDS} rounds")
    options = parser.parse_args(arguments)
    rounds = options.rounds or (QUICK_ROUNDS if options.quick else ROUNDS)

    def begin() -> tuple[Sequence[cases.Case], dict[str, Any]]:
        return cases.select(options.rows), report.new_report({"rounds": rounds})

    def measured(case: cases.Case) -> dict[str, Any]:
        calls, notes = cases.build(case)
        cases.check_agreement(calls)
        return report.row(case.name, measure(calls, baseline=case.baseline, rounds=rounds), notes)

    return command.execute(NAME, options, begin, measured)


if __name__ == "__main__":
    sys.exit(main())
