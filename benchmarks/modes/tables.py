"""The report of `benchmarks.ad_modes`: rows are models, columns are modes or peers."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from benchmarks import table, targets
from benchmarks.modes.targets import title
from benchmarks.targets import Target

MOST = 200
"""The number of characters of an explanation to show. Explanations may be pages long."""

PEERS = ("numpyro", "torch", "enzyme-ad")
"""The packages whose versions a report contains."""

Cell = Callable[[Mapping[str, Any]], str]


def render(report: Mapping[str, Any], found: Sequence[Target], *, markdown: bool) -> str:
    """The tables of a report, the machine it was measured on, the targets and the notes.

    **Arguments:**

    - `report`: the report of `benchmarks.ad_modes`.
    - `found`: the targets of `benchmarks.modes.targets`.
    - `markdown`: whether to write Markdown instead of aligned plain text.
    """
    rows = report["rows"]
    if not rows:
        return "no models were measured"
    draw = table.markdown_table if markdown else table.text_table
    parts = [
        "Value and gradient, microseconds until the result is ready (ratio to the value "
        f"alone)\n\n{draw(cells(rows, 'modes', _time, ('unknowns', 'primal')))}",
        "Largest relative error of the gradient: float32 to finite differences in float64, "
        "and finite differences to reverse mode\n\n"
        f"{draw(cells(rows, 'modes', _error))}",
        f"Temporary memory, kB\n\n{draw(cells(rows, 'modes', _peak))}",
        f"Trace and compile, milliseconds\n\n{draw(cells(rows, 'modes', _first))}",
    ]
    if any(row["peers"] for row in rows):
        parts.append(
            "Peers: value and gradient, microseconds until the result is ready (ratio to "
            f"the value alone)\n\n{draw(cells(rows, 'peers', _time))}"
        )
    if found:
        parts.append(targets.render(found))
    parts.append(f"{table.describe(report)}\n{_peer_versions(report)}")
    notes = {note for row in rows for note in row["notes"]} | set(_explanations(rows))
    if notes:
        parts.append("\n".join(sorted(notes)))
    return "\n\n".join(parts)


def cells(
    rows: Sequence[Mapping[str, Any]], of: str, cell: Cell, first: Sequence[str] = ()
) -> list[list[str]]:
    """The cells of a table, starting with the headings.

    **Arguments:**

    - `rows`: the rows of a report.
    - `of`: the kind of columns, "modes" or "peers".
    - `cell`: returns the text of a cell.
    - `first`: the first columns, "unknowns" or "primal" or both.
    """
    names = list(dict.fromkeys(each["mode"] for row in rows for each in row[of]))
    lines = [["", *first, *names]]
    for row in rows:
        before = {"unknowns": str(row["unknowns"]), "primal": _primal(row)}
        own = {each["mode"]: _verdict_or(cell, each) for each in row[of]}
        if own:
            own_cells = [own.get(name, "") for name in names]
            lines.append([title(row), *(before[name] for name in first), *own_cells])
    return lines


def _verdict_or(cell: Cell, of: Mapping[str, Any]) -> str:
    """The cell, followed by the verdict if it is not `ok`."""
    text = cell(of)
    return text if of["verdict"] == "ok" else f"{text} {of['verdict']}".strip()


def _primal(row: Mapping[str, Any]) -> str:
    times = [mode["primal_us"] for mode in row["modes"] if mode["primal_us"] is not None]
    return _number(times[0]) if times else ""


def _time(of: Mapping[str, Any]) -> str:
    if of["gradient_us"] is None:
        return ""
    return f"{_number(of['gradient_us'])} ({of['ratio']:.2f})"


def _error(of: Mapping[str, Any]) -> str:
    return "" if of["max_relative_error"] is None else f"{of['max_relative_error']:.0e}"


def _peak(of: Mapping[str, Any]) -> str:
    return "" if of["peak_bytes"] is None else _number(of["peak_bytes"] / 1000)


def _first(of: Mapping[str, Any]) -> str:
    return "" if of["first_call_ms"] is None else f"{of['first_call_ms']:.0f}"


def _number(number: float) -> str:
    """The number with at most three digits, or as an integer."""
    return f"{number:.{sum(number < power for power in (100, 10))}f}"


def _peer_versions(report: Mapping[str, Any]) -> str:
    versions = {name: report["machine"].get(name) for name in PEERS}
    return ", ".join(f"{name} {version or 'not installed'}" for name, version in versions.items())


def _explanations(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """The reason of each verdict, in one line."""
    return [
        f"{title(row)}, {each['mode']}: {' '.join(each['explanation'].split())[:MOST]}"
        for row in rows
        for each in (*row["modes"], *row["peers"])
        if each["explanation"]
    ]
