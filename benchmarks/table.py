"""Render a report as tables: `python -m benchmarks.table FILE [--markdown] [--baseline COLUMN]`."""

import argparse
import json
import pathlib
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks import report as reports
from eqxlike._timing import Column

Rows = Sequence[Sequence[str]]


def render(report: Mapping[str, Any], *, markdown: bool, baseline: str | None = None) -> str:
    """Return both tables of a report, what they were measured on, and the notes.

    Args:
        report: as `benchmarks.report` makes it.
        markdown: whether to write Markdown rather than plain aligned text.
        baseline: the column that ratios are taken to; each row's own where None.
    """
    if not report["rows"]:
        return "no rows were measured"
    draw = markdown_table if markdown else text_table
    to = baseline or report["rows"][0]["baseline"]
    parts = []
    for kind, words in (
        ("completion", "until the result is ready"),
        ("dispatch", "until the call returns"),
    ):
        title = f"{kind.capitalize()}, microseconds a call {words} (ratio to {to})"
        parts.append(f"{title}\n\n{draw(cells(report, kind, baseline))}")
    parts.append(describe(report))
    notes = sorted({note for row in report["rows"] for note in row["notes"]})
    if notes:
        parts.append("\n".join(notes))
    return "\n\n".join(parts)


def cells(report: Mapping[str, Any], kind: str, baseline: str | None = None) -> Rows:
    """Return the cells of one table, headings first.

    Args:
        report: as `benchmarks.report` makes it.
        kind: "dispatch" or "completion".
        baseline: the column that ratios are taken to; each row's own where None.
    """
    names = list(dict.fromkeys(name for row in report["rows"] for name in row["columns"]))
    table = [["", *names]]
    for row in report["rows"]:
        columns = reports.measurement(row, baseline).columns
        table.append(
            [
                row["name"],
                *(_cell(columns[name], kind) if name in columns else "" for name in names),
            ]
        )
    return table


def text_table(rows: Rows) -> str:
    """Return aligned plain text."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]).rstrip()
        for row in rows
    ]
    return "\n".join([lines[0], "-" * max(map(len, lines)), *lines[1:]])


def markdown_table(rows: Rows) -> str:
    """Return a Markdown table, numbers to the right."""
    rule = ["---", *["---:"] * (len(rows[0]) - 1)]
    return "\n".join("| " + " | ".join(row) + " |" for row in (rows[0], rule, *rows[1:]))


def describe(report: Mapping[str, Any]) -> str:
    """Return two lines on versions, machine and method."""
    machine, method = report["machine"], report["method"]
    names = ("eqxlike", "jax", "jaxlib", "numpy", "equinox", "flax", "python")
    versions = ", ".join(f"{name} {machine[name] or 'not installed'}" for name in names)
    return (
        f"{versions}\n{machine['device']} ({machine['cpu']}, {machine['cores']} cores), "
        f"{machine['date']}; {method['rounds']} interleaved rounds, median of per-round ratios"
    )


def _cell(column: Column, kind: str) -> str:
    time_us = getattr(column, f"{kind}_us")
    ratio = getattr(column, f"{kind}_ratio").median
    return f"{time_us:.{1 if time_us < 100 else 0}f} ({ratio:.2f})"


def main(arguments: Sequence[str] | None = None) -> int:
    """Render a report that an earlier run wrote."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.table", description=__doc__)
    parser.add_argument("file", type=pathlib.Path, help="what --json of a benchmark wrote")
    parser.add_argument("--markdown", action="store_true", help="Markdown instead of plain text")
    parser.add_argument("--baseline", metavar="COLUMN", help="take ratios to this column")
    options = parser.parse_args(arguments)
    try:
        report = json.loads(options.file.read_text())
        print(render(report, markdown=options.markdown, baseline=options.baseline))
    except (OSError, ValueError) as error:
        print(f"benchmarks.table: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
