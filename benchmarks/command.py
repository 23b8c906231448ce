"""The options that all benchmark commands share, and the way from their rows to a report.

A simple command measures cases in one table; a row of several tables has its table and check.
"""

import argparse
import dataclasses
import pathlib
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from benchmarks import ages, report, table
from benchmarks.cases import Case, NamedT, build, check_agreement, find
from benchmarks.report import Table, Target
from benchmarks.timing import Call, measure, measure_first_calls
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
    """The options that `new_parser` adds, and the number of rounds to measure.

    **Arguments:**

    - `arguments`: the arguments of the command; by default `sys.argv[1:]`.
    - `name`: the name of the command's module.
    - `description`: the description in `--help`.
    - `rounds`: the number of rounds of a row.
    - `first_rounds`: the rounds of first calls, if there are any. Then `first_rounds` is an option
      like `rounds`.
    - `rows`: the command's name for its rows, and for the option that selects them.
    - `flags`: additional boolean options, with their help texts.
    """
    kinds = {"rounds": (rounds, "quote results of at least 15 rounds")}
    quick = f"{rounds.quick} rounds"
    if first_rounds is not None:
        kinds["first_rounds"] = first_rounds, "rounds of first calls and compilations"
        quick += f", {first_rounds.quick} of first calls"
    parser = new_parser(name, description, (rows,), quick)
    for flag, what in (flags or {}).items():
        parser.add_argument(f"--{flag}", action="store_true", help=what)
    for kind, (number, what) in kinds.items():
        parser.add_argument(
            f"--{kind.replace('_', '-')}",
            type=whole_number_in,
            metavar="N",
            help=f"default {number.default}; {what}",
        )
    options = parser.parse_args(arguments)
    for kind, (number, _) in kinds.items():
        if getattr(options, kind) is None:
            setattr(options, kind, number.quick if options.quick else number.default)
    return options


def new_parser(
    name: str, description: str | None, rows: Sequence[str], quick: str
) -> argparse.ArgumentParser:
    """A parser of the options `json`, `quick` and `markdown`, and one for each name in `rows`.

    **Arguments:**

    - `name`: the name of the command's module.
    - `description`: what the command does.
    - `rows`: names for parts of the rows, and for the options that select them.
    - `quick`: what a quick run does.
    """
    parser = argparse.ArgumentParser(
        prog=f"python -m {name}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--json", type=pathlib.Path, metavar="FILE", help="write all numbers to FILE"
    )
    for each in rows:
        parser.add_argument(
            f"--{each}", default="", metavar="REGEX", help=f"only {each} whose name matches"
        )
    parser.add_argument(
        "--quick", action="store_true", help=f"{quick}: for a first look, not for quoting"
    )
    parser.add_argument(
        "--markdown", action="store_true", help="print Markdown instead of plain text"
    )
    return parser


def measure_cases(
    arguments: Sequence[str] | None,
    name: str,
    description: str | None,
    rounds: Rounds,
    among: Sequence[Case],
    targets_of: Callable[[Mapping[str, Any]], Iterable[Target]] = lambda result: (),
    notes_of: Callable[[Mapping[str, Any]], list[str]] = lambda calls: [],
) -> int:
    """Checks, measures and prints cases. This is a complete benchmark command.

    **Arguments:**

    - `arguments`: the arguments of the command; by default `sys.argv[1:]`.
    - `name`: the name of the command's module.
    - `description`: the description in `--help`.
    - `rounds`: the number of rounds of a row.
    - `among`: the cases to choose from.
    - `targets_of`: returns the targets of a report.
    - `notes_of`: from the calls of a row, by column, to further notes.

    **Returns:** the exit status: 2 for a wrong argument, 130 after Ctrl-C.
    """
    options = parse(arguments, name, description, rounds)

    def measured(case: Case) -> dict[str, Any]:
        calls, notes = build(case)
        check_agreement(calls)
        found = measure(calls, baseline=case.baseline, rounds=options.rounds)
        return report.row(case.name, found, [*notes, *notes_of(calls)])

    return execute(
        name, options, lambda: find(options.rows, among), measured, targets_of=targets_of
    )


# --- rows of several tables ---


@dataclasses.dataclass(frozen=True)
class Row:
    """A case with its table and its own check.

    Libraries may draw different parameters, but must compute the same outputs.

    - `table`: the table of the row.
    - `case`: the name, the columns and the baseline.
    - `check`: called with the output of the builders, by column. Raises AssertionError if columns
      differ.
    - `count_lines`: returns the number of lines of each column's lowered program, if it is shown.
    """

    table: Table
    case: Case
    check: Callable[[Mapping[str, Call]], None]
    count_lines: Callable[[], dict[str, int]] | None = None

    @property
    def name(self) -> str:
        """The name that selects the row: the title of the table and the name of the case."""
        return f"{self.table.title}; {self.case.name}"

    def measured(self, options: argparse.Namespace) -> dict[str, Any]:
        """Checks and measures the row; returns it in the form of the report."""
        calls, notes = build(self.case)
        self.check(calls)
        # Without Equinox, ratios are relative to eqxlike.
        baseline = self.case.baseline if self.case.baseline in calls else next(iter(calls))
        if self.table.is_first_call:
            times = measure_first_calls(calls, baseline=baseline, rounds=options.first_rounds)
        else:
            times = measure(calls, baseline=baseline, rounds=options.rounds)
        found = report.row(self.case.name, times, notes, self.table.title)
        return found if self.count_lines is None else found | {"lines": self.count_lines()}


@dataclasses.dataclass(frozen=True)
class OwnRow:
    """A row that is measured in its own way.

    - `name`: the name to select the row by.
    - `table`: the title of its table.
    - `measured`: from the options of the command to the row in the form of the report.
    - `backend`: the only backend for it, if any.
    """

    name: str
    table: str
    measured: Callable[[argparse.Namespace], dict[str, Any]]
    backend: str | None = None


def measure_rows(
    name: str,
    options: argparse.Namespace,
    among: Sequence[Row],
    finish: Callable[[dict[str, Any]], None] = lambda result: None,
    render: Callable[..., str] = table.render,
) -> int:
    """Checks and measures rows of several tables, and prints them.

    **Arguments:**

    - `name`: the name of the command's module.
    - `options`: the options as `parse` returns them, with `first_rounds`.
    - `among`: the rows to choose from.
    - `finish`, `render`: as `execute` takes them.

    **Returns:** the exit status: 2 for a wrong argument, 130 after Ctrl-C.
    """
    return execute(
        name,
        options,
        lambda: find(options.rows, among),
        lambda row: row.measured(options),
        method={"rounds": options.rounds, "first_rounds": options.first_rounds},
        tables=list(dict.fromkeys(row.table for row in among)),
        finish=finish,
        render=render,
    )


# --- measuring and printing ---


def execute(
    name: str,
    options: argparse.Namespace,
    select: Callable[[], Sequence[NamedT]],
    measured: Callable[[NamedT], dict[str, Any]],
    *,
    method: Mapping[str, Any] | None = None,
    tables: Sequence[Table] = (),
    packages: Sequence[str] = (),
    folders: Sequence[str] = ages.FOLDERS,
    targets_of: Callable[[Mapping[str, Any]], Iterable[Target]] = lambda result: (),
    finish: Callable[[dict[str, Any]], None] = lambda result: None,
    render: Callable[..., str] = table.render,
) -> int:
    """Measures and prints.

    **Arguments:**

    - `name`: the name of the command's module.
    - `options`: the options, as `parse` returns them.
    - `select`: returns the selected rows; raises ValueError for options that select none, and
      ImportError without a package that all rows need.
    - `measured`: measures one row and returns it in the form of the report.
    - `method`: the method of measurement; by default the number of rounds.
    - `tables`, `packages`, `folders`: as `report.new_report` takes them.
    - `targets_of`: from the report to the targets of its rows.
    - `finish`: adds further measurements to the report after the rows.
    - `render`: from the report, and `markdown=`, to the text that is printed.

    **Returns:** the exit status: 2 for a wrong argument, 130 after Ctrl-C.
    """
    try:
        rows = select()
        method = {"rounds": options.rounds} if method is None else method
        result = report.new_report(method, tables, packages=packages, folders=folders)
        _write(result, options)
    except (ImportError, OSError, ValueError) as error:
        print(f"{name}: {error}", file=sys.stderr)
        return 2
    status = 0
    try:
        for number, row in enumerate(rows, start=1):
            start_s = time.perf_counter()
            result["rows"].append(measured(row))
            result["is_complete"] = number == len(rows)
            _write(result, options)  # after each row, to lose nothing
            elapsed_s = time.perf_counter() - start_s
            print(f"[{number}/{len(rows)}] {row.name}: {elapsed_s:.0f} s", file=sys.stderr)
        finish(result)
        _write(result, options)
    except KeyboardInterrupt:
        print("interrupted; these rows are finished:", file=sys.stderr)
        status = 130
    print(render(result, markdown=options.markdown))
    if found := list(targets_of(result)):
        print(f"\n{report.render_targets(found)}")
    return status


def _write(result: Mapping[str, Any], options: argparse.Namespace) -> None:
    if options.json is not None:
        report.write(result, options.json)
