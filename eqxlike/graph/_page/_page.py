"""A report as one page of HTML, with the graph as SVG."""

import html
import json
import pathlib
from collections.abc import Iterable
from typing import Any

from .._operations import Program
from .._rows import Group, edges_in, nested
from .._text import Table, headline, lines, tables

_TEMPLATE = pathlib.Path(__file__).with_name("template.html")


def page_of(report: Any) -> str:
    """The page; nothing in it is fetched from elsewhere."""
    programs = {"Function": report.program}
    if report.gradient is not None:
        programs["With gradient"] = report.gradient.program
    graphs = {name: _graph(program) for name, program in programs.items()}
    parts = {
        "TITLE": html.escape(report.name),
        "HEADLINE": html.escape(headline(report)),
        "WARNINGS": "".join(f'<p class="warning">{html.escape(x)}</p>' for x in report.warnings),
        "LINES": "".join(map(_line, lines(report))),
        "TABLES": "".join(map(_table, tables(report))),
        # Inside of a script, `</script` would end it, and `<!--<script` keep it from ending.
        "GRAPHS": json.dumps(graphs, separators=(",", ":")).replace("<", "\\u003c"),
    }
    page = _TEMPLATE.read_text(encoding="utf-8")
    # In one go: what is put in may look like a mark.
    pieces = page.split("@@")
    return "".join(parts.get(piece, piece) for piece in pieces)


def _line(text: str) -> str:
    name, _, rest = text.partition(": ")
    if not rest:
        return f"<dt></dt><dd>{html.escape(text)}</dd>"
    return f"<dt>{html.escape(name)}</dt><dd>{html.escape(rest)}</dd>"


def _table(table: Table) -> str:
    def row(cells: Iterable[str], tag: str) -> str:
        return f"<tr>{''.join(f'<{tag}>{html.escape(cell)}</{tag}>' for cell in cells)}</tr>"

    body = "".join(row(cells, "td") for cells in table.rows)
    return (
        f"<section><h2>{html.escape(table.title)}</h2><div class=scroll><table>"
        f"<thead>{row(table.header, 'th')}</thead><tbody>{body}</tbody></table></div></section>"
    )


def _graph(program: Program) -> dict[str, Any]:
    """What the script draws: operations, edges between them, and the groups around them."""
    return {
        "operations": [
            [
                each.kind,
                each.output,
                each.times * ((each.flops or 0) + (each.transcendentals or 0)),
                each.times,
                each.source,
            ]
            for each in (step.operation for step in program.steps)
        ],
        "edges": edges_in(program),
        "root": _group(nested(program)),
    }


def _group(group: Group) -> dict[str, Any]:
    return {
        "name": group.name,
        "start": group.start,
        "stop": group.stop,
        "parts": [part if isinstance(part, int) else _group(part) for part in group.parts],
    }
