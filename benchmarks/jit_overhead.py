"""What a call of a compiled function costs: filter_jit beside raw `jax.jit`, Equinox and NNX.

Every column of a row computes the same numbers, which is checked before anything is timed. The
method is that of `eqxlike._timing`. Ctrl-C prints the rows that are finished.
"""

import argparse
import pathlib
import sys
import time
from collections.abc import Sequence
from typing import Any

from benchmarks import cases, report, table
from eqxlike._timing import measure

ROUNDS = 200
QUICK_ROUNDS = 15


def run(
    selected: Sequence[cases.Case],
    result: dict[str, Any],
    path: pathlib.Path | None,
    rounds: int,
) -> None:
    """Measure cases one by one into a report; write it after each, so that an end loses nothing.

    Args:
        selected: the rows.
        result: the report that the rows are added to.
        path: where to write the report, or None.
        rounds: as for `measure`.
    """
    for number, case in enumerate(selected, start=1):
        start_s = time.perf_counter()
        calls, notes = cases.build(case)
        cases.check_agreement(calls)
        measured = measure(calls, baseline=case.baseline, rounds=rounds)
        result["rows"].append(report.row(case.name, measured, notes))
        result["is_complete"] = number == len(selected)
        if path is not None:
            report.write(result, path)
        elapsed_s = time.perf_counter() - start_s
        print(f"[{number}/{len(selected)}] {case.name}: {elapsed_s:.0f} s", file=sys.stderr)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print; return the exit status: 2 for a wrong argument, 130 after Ctrl-C."""
    options = _parser().parse_args(arguments)
    rounds = options.rounds or (QUICK_ROUNDS if options.quick else ROUNDS)
    try:
        selected = cases.select(options.rows)
        result = report.new_report({"rounds": rounds})
        if options.json is not None:
            report.write(result, options.json)
    except (OSError, ValueError) as error:
        print(f"benchmarks.jit_overhead: {error}", file=sys.stderr)
        return 2
    status = 0
    try:
        run(selected, result, options.json, rounds)
    except KeyboardInterrupt:
        print("interrupted; these rows are finished:", file=sys.stderr)
        status = 130
    print(table.render(result, markdown=options.markdown))
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.jit_overhead",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", type=pathlib.Path, metavar="FILE", help="write all numbers there")
    parser.add_argument("--rows", default="", metavar="REGEX", help="only rows whose name it finds")
    parser.add_argument(
        "--rounds", type=_positive, metavar="N", help=f"default {ROUNDS}; quote from 15 or more"
    )
    parser.add_argument(
        "--quick", action="store_true", help=f"{QUICK_ROUNDS} rounds: a first look, not for quoting"
    )
    parser.add_argument("--markdown", action="store_true", help="Markdown instead of plain text")
    return parser


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be 1 or more, got {number}")
    return number


if __name__ == "__main__":
    sys.exit(main())
