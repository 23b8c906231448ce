"""Reports as tables: `python -m benchmarks.table FILE [--markdown] [--baseline COLUMN]`."""

import argparse
import json
import pathlib
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks import report as reports
from benchmarks.timing import Column

Rows = Sequence[Sequence[str]]

CLOCKS = {"completion": "until the result is ready", "dispatch": "until the call returns"}
UNITS_US = {"microseconds": 1.0, "milliseconds": 1e3}

MEMORY = {
    "peak_bytes": "Peak memory of a call by XLA's analysis",
    "process_bytes": "By how much a fresh process grows for such calls",
}

PACKAGES = ("eqxlike", "jax", "jaxlib", "numpy", "equinox", "flax", "python")
"""The packages whose versions are printed by default."""

ONLY_TABLE = {"title": "", "clocks": tuple(CLOCKS), "unit": "microseconds"}
"""The table of all rows, if a report names no tables."""


def render(report: Mapping[str, Any], *, markdown: bool, baseline: str | None = None) -> str:
    """The tables of a report, the machine they were measured on, and the notes.

    **Arguments:**

    - `report`: a report of `benchmarks.report`.
    - `markdown`: whether to write Markdown instead of aligned plain text.
    - `baseline`: the column that is the denominator of ratios. By default, and if a table does not
      have this column, the baseline of each row.
    """
    if not report["rows"]:
        return "no rows were measured"
    draw = markdown_table if markdown else text_table
    parts = []
    exists = baseline in _column_names(report["rows"], "columns")
    for table in report.get("tables", (ONLY_TABLE,)):
        rows = [row for row in report["rows"] if row.get("table", "") == table["title"]]
        is_elsewhere = exists and baseline not in _column_names(rows, "columns")
        to = None if is_elsewhere else baseline
        for clock in table["clocks"] if rows else ():
            heading = f"{table['title']}: {clock}" if table["title"] else clock.capitalize()
            ratios = f"ratio to {to or rows[0]['baseline']}"
            title = f"{heading}, {table['unit']} {CLOCKS[clock]} ({ratios})"
            parts.append(f"{title}\n\n{draw(cells({'rows': rows}, clock, to, table['unit']))}")
        if any("lines" in row for row in rows):
            parts.append(f"Lines of the lowered program\n\n{draw(line_cells(rows))}")
        for kind, title in MEMORY.items():
            if any(kind in row for row in rows):
                title = f"{title}, MiB (ratio to the first column)"
                parts.append(f"{title}\n\n{draw(memory_cells(rows, kind))}")
        if any("rates" in row for row in rows):
            title = "Tokens or examples a second (share of the device's peak)"
            parts.append(f"{title}\n\n{draw(rate_cells(rows))}")
    parts.append(describe(report))
    notes = sorted({note for row in report["rows"] for note in row["notes"]})
    if notes:
        parts.append("\n".join(notes))
    return "\n\n".join(parts)


def cells(
    report: Mapping[str, Any],
    clock: str,
    baseline: str | None = None,
    unit: str = ONLY_TABLE["unit"],
) -> Rows:
    """The cells of a table, starting with the headings.

    **Arguments:**

    - `report`: a report of `benchmarks.report`.
    - `clock`: "dispatch" or "completion".
    - `baseline`: the column that is the denominator of ratios. By default the baseline of each row.
    - `unit`: the unit of the times, one of `UNITS_US`.
    """
    names = _column_names(report["rows"], "columns")
    table = [["", *names]]
    for row in report["rows"]:
        columns = reports.measurement(row, baseline).columns
        table.append(
            [
                row["name"],
                *(_cell(columns[name], clock, unit) if name in columns else "" for name in names),
            ]
        )
    return table


def line_cells(rows: Sequence[Mapping[str, Any]]) -> Rows:
    """The cells of the table of program sizes, starting with the headings."""
    names = _column_names(rows, "lines")
    return [
        ["", *names],
        *([row["name"], *(str(row["lines"][name]) for name in names)] for row in rows),
    ]


def memory_cells(rows: Sequence[Mapping[str, Any]], kind: str) -> Rows:
    """The cells of the table of a kind of memory, a key of `MEMORY`, starting with the headings."""
    rows = [row for row in rows if kind in row]
    names = _column_names(rows, kind)
    cells = [["", *names]]
    for row in rows:
        found = row[kind]
        ratios = {name: size / found[names[0]] for name, size in found.items()}
        texts = {name: f"{found[name] / 2**20:.1f} ({ratios[name]:.2f})" for name in found}
        cells.append([row["name"], *(texts.get(name, "") for name in names)])
    return cells


def rate_cells(rows: Sequence[Mapping[str, Any]]) -> Rows:
    """The cells of the table of tokens or examples a second, starting with the headings."""
    names = _column_names(rows, "columns")
    cells = [["", *names]]
    for row in rows:
        speeds, most = row["rates"]["per_second"], row["rates"]["peak_per_second"]
        shares = {name: f" ({speed / most:.2f})" if most else "" for name, speed in speeds.items()}
        texts = {name: f"{speed:.0f}{shares[name]}" for name, speed in speeds.items()}
        cells.append([row["name"], *(texts.get(name, "") for name in names)])
    return cells


def text_table(rows: Rows) -> str:
    """A table as aligned plain text."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]).rstrip()
        for row in rows
    ]
    return "\n".join([lines[0], "-" * max(map(len, lines)), *lines[1:]])


def markdown_table(rows: Rows) -> str:
    """A table as Markdown, with right-aligned numbers."""
    rule = ["---", *["---:"] * (len(rows[0]) - 1)]
    return "\n".join("| " + " | ".join(row) + " |" for row in (rows[0], rule, *rows[1:]))


def describe(
    report: Mapping[str, Any], packages: Sequence[str] = PACKAGES, method: str | None = None
) -> str:
    """Two lines on versions, machine and method; by default the numbers of rounds."""
    machine, done = report["machine"], report["method"]
    if method is None:
        method = f"{done['rounds']} interleaved rounds, median of per-round ratios"
        if "first_rounds" in done:
            method += f"; {done['first_rounds']} of first calls and compilations"
    return (
        f"{versions(report, packages)}\n{machine['device']} ({machine['cpu']}, "
        f"{machine['cores']} cores), {machine['date']}; {method}"
    )


def versions(report: Mapping[str, Any], packages: Sequence[str]) -> str:
    """The versions of packages in a report."""
    found = report["machine"]
    return ", ".join(f"{name} {found.get(name) or 'not installed'}" for name in packages)


def _column_names(rows: Sequence[Mapping[str, Any]], of: str) -> list[str]:
    """The columns in the part `of` of any row, in order."""
    return list(dict.fromkeys(name for row in rows for name in row[of]))


def _cell(column: Column, clock: str, unit: str) -> str:
    time = getattr(column, f"{clock}_us") / UNITS_US[unit]
    ratio = getattr(column, f"{clock}_ratio").median
    # A tenth of a microsecond is noise, but a tenth of a millisecond may be the whole time.
    most = 1 if unit == "microseconds" else 3
    digits = min(most, sum(time < power for power in (100, 10, 1)))
    return f"{time:.{digits}f} ({ratio:.2f})"


def main(arguments: Sequence[str] | None = None) -> int:
    """Renders a report that an earlier run wrote."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.table", description=__doc__)
    parser.add_argument("file", type=pathlib.Path, help="a file that `--json` of a benchmark wrote")
    parser.add_argument(
        "--markdown", action="store_true", help="print Markdown instead of plain text"
    )
    parser.add_argument("--baseline", metavar="COLUMN", help="show ratios to this column")
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
