"""The options of all benchmark commands, and the loop that measures rows and writes a report."""

import argparse
import pathlib
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from benchmarks import report, table, targets
from benchmarks.cases import Case, NamedT, build, check_agreement, find
from benchmarks.targets import Target
from benchmarks.timing import measure
from eqxlike._check_numbers import whole_number_in


class Rounds(NamedTuple):
    """The number of rounds that a command measures by default, and in a quick run."""

    default: int
    quick: int


def parse(
    arguments: Sequence[str] | None,
    name: str,
    description: str | None,
    rounds: Rounds,
    first_rounds: Rounds | None = None,
    *,
    rows: str = "rows",
    flags: Mapping[str, str] | None = None,
) -> argparse.Namespace:
    """The options of a command: `json`, `rows`, `markdown`, and the number of rounds to measure.

    **Arguments:**

    - `arguments`: the arguments of the command, by default `sys.argv[1:]`.
    - `name`: the name of the command's module.
    - `description`: the description in `--help`.
    - `rounds`: the number of rounds of a row.
    - `first_rounds`: the rounds of first calls, if there are any. Then `first_rounds` is an option
      like `rounds`.
    - `rows`: the command's name for its rows, and for the option that selects them.
    - `flags`: additional boolean options, with their help texts.
    """
    parser = argparse.ArgumentParser(
        prog=f"python -m {name}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--json", type=pathlib.Path, metavar="FILE", help="write all numbers to FILE"
    )
    parser.add_argument(
        f"--{rows}", default="", metavar="REGEX", help=f"only {rows} whose name matches"
    )
    for flag, what in (flags or {}).items():
        parser.add_argument(f"--{flag}", action="store_true", help=what)
    parser.add_argument(
        "--rounds",
        type=whole_number_in,
        metavar="N",
        help=f"default {rounds.default}; quote results of at least 15 rounds",
    )
    quick = f"{rounds.quick} rounds"
    if first_rounds is not None:
        quick += f", {first_rounds.quick} of first calls"
        parser.add_argument(
            "--first-rounds",
            type=whole_number_in,
            metavar="N",
            help=f"rounds of first calls and compilations; default {first_rounds.default}",
        )
    parser.add_argument(
        "--quick", action="store_true", help=f"{quick}: for a first look, not for quoting"
    )
    parser.add_argument(
        "--markdown", action="store_true", help="print Markdown instead of plain text"
    )
    options = parser.parse_args(arguments)
    options.rounds = options.rounds or _chosen(rounds, options.quick)
    if first_rounds is not None:
        options.first_rounds = options.first_rounds or _chosen(first_rounds, options.quick)
    return options


def _chosen(rounds: Rounds, is_quick: bool) -> int:
    return rounds.quick if is_quick else rounds.default


def measure_cases(
    arguments: Sequence[str] | None,
    name: str,
    description: str | None,
    rounds: Rounds,
    among: Sequence[Case],
    targets_of: Callable[[Mapping[str, Any]], Iterable[Target]] = lambda result: (),
) -> int:
    """Checks, measures and prints cases. This is a complete benchmark command.

    **Arguments:**

    - `arguments`: the arguments of the command, by default `sys.argv[1:]`.
    - `name`: the name of the command's module.
    - `description`: the description in `--help`.
    - `rounds`: the number of rounds of a row.
    - `among`: the cases to choose from.
    - `targets_of`: returns the targets of a report.

    **Returns:** the exit status: 2 for a wrong argument, 130 after Ctrl-C.
    """
    options = parse(arguments, name, description, rounds)

    def begin() -> tuple[Sequence[Case], dict[str, Any]]:
        return find(options.rows, among), report.new_report({"rounds": options.rounds})

    def measured(case: Case) -> dict[str, Any]:
        calls, notes = build(case)
        check_agreement(calls)
        found = measure(calls, baseline=case.baseline, rounds=options.rounds)
        return report.row(case.name, found, notes)

    return execute(name, options, begin, measured, targets_of)


def execute(
    name: str,
    options: argparse.Namespace,
    begin: Callable[[], tuple[Sequence[NamedT], dict[str, Any]]],
    measured: Callable[[NamedT], dict[str, Any]],
    targets_of: Callable[[Mapping[str, Any]], Iterable[Target]] = lambda result: (),
    render: Callable[..., str] = table.render,
) -> int:
    """Measures and prints.

    **Arguments:**

    - `name`: the name of the command's module.
    - `options`: the options that `parse` returns.
    - `begin`: returns the selected rows and an empty report. Raises ValueError if the options
      select no row.
    - `measured`: measures a row and returns it in the form of the report.
    - `targets_of`: returns the targets of a report.
    - `render`: converts a report to text, called with `markdown=`.

    **Returns:** the exit status: 2 for a wrong argument, 130 after Ctrl-C.
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
    print(render(result, markdown=options.markdown))
    if found := list(targets_of(result)):
        print(f"\n{targets.render(found)}")
    return status


def run(
    rows: Sequence[NamedT],
    result: dict[str, Any],
    path: pathlib.Path | None,
    measured: Callable[[NamedT], dict[str, Any]],
) -> None:
    """Measures rows and adds them to a report. Writes the report after each row.

    **Arguments:**

    - `rows`: the rows to measure.
    - `result`: the report.
    - `path`: the file of the report, or None.
    - `measured`: measures a row and returns it in the form of the report.
    """
    for number, row in enumerate(rows, start=1):
        start_s = time.perf_counter()
        result["rows"].append(measured(row))
        result["is_complete"] = number == len(rows)
        if path is not None:
            report.write(result, path)
        elapsed_s = time.perf_counter() - start_s
        print(f"[{number}/{len(rows)}] {row.name}: {elapsed_s:.0f} s", file=sys.stderr)
