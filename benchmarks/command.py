"""What the commands of benchmarks share: their options, and the way from rows to a report."""

import argparse
import pathlib
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks import report, table
from benchmarks.cases import NamedT
from eqxlike._numbers import whole_number_in


def parser(name: str, description: str | None, rounds: int, quick: str) -> argparse.ArgumentParser:
    """Return the options that every command has.

    Args:
        name: of the command's module.
        description: what the command does.
        rounds: how often it measures a row by default.
        quick: what `--quick` does instead.
    """
    options = argparse.ArgumentParser(
        prog=f"python -m {name}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    options.add_argument(
        "--json", type=pathlib.Path, metavar="FILE", help="write all numbers there"
    )
    options.add_argument(
        "--rows", default="", metavar="REGEX", help="only rows whose name it finds"
    )
    options.add_argument(
        "--rounds",
        type=whole_number_in,
        metavar="N",
        help=f"default {rounds}; quote from 15 or more",
    )
    options.add_argument(
        "--quick", action="store_true", help=f"{quick}: a first look, not for quoting"
    )
    options.add_argument("--markdown", action="store_true", help="Markdown instead of plain text")
    return options


def execute(
    name: str,
    options: argparse.Namespace,
    begin: Callable[[], tuple[Sequence[NamedT], dict[str, Any]]],
    measured: Callable[[NamedT], dict[str, Any]],
) -> int:
    """Measure and print.

    Args:
        name: of the command's module.
        options: as `parser` returns them.
        begin: returns the selected rows and the report to add them to; raises ValueError for
            options that select none.
        measured: measures one row and returns it as the report takes it.

    Returns:
        The exit status: 2 for a wrong argument, 130 after Ctrl-C.
    """
    try:
        rows, result = begin()
        if options.json is not None:
            report.write(result, options.json)
    except (OSError, ValueError) as error:
        print(f"{name}: {error}", file=sys.stderr)
        return 2
    status = 0
    try:
        run(rows, result, options.json, measured)
    except KeyboardInterrupt:
        print("interrupted; these rows are finished:", file=sys.stderr)
        status = 130
    print(table.render(result, markdown=options.markdown))
    return status


def run(
    rows: Sequence[NamedT],
    result: dict[str, Any],
    path: pathlib.Path | None,
    measured: Callable[[NamedT], dict[str, Any]],
) -> None:
    """Measure rows one by one into a report; write it after each, so that an end loses nothing.

    Args:
        rows: what to measure.
        result: the report that the rows are added to.
        path: where to write the report, or None.
        measured: measures one row and returns it as the report takes it.
    """
    for number, row in enumerate(rows, start=1):
        start_s = time.perf_counter()
        result["rows"].append(measured(row))
        result["is_complete"] = number == len(rows)
        if path is not None:
            report.write(result, path)
        elapsed_s = time.perf_counter() - start_s
        print(f"[{number}/{len(rows)}] {row.name}: {elapsed_s:.0f} s", file=sys.stderr)
