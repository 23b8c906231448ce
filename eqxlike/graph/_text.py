"""Renders a report as text, as tables of rich, and as an HTML page with the graph as SVG."""

import collections
import html
import operator
import pathlib
from collections.abc import Sequence
from typing import Any

from .._tables import (
    align,
    grouped,
    html_table,
    html_warnings,
    page_from,
    rich_table,
    script_of,
)
from ._operations import Program, source_of
from ._rows import Row

Table = tuple[str, tuple[str, ...], tuple[tuple[str, ...], ...]]
"""Title, header and rows of a table."""


def as_text(report: Any) -> str:
    """Renders a report as plain text."""
    parts = [headline(report), *(f"Warning: {each}" for each in report.warnings)]
    for title, header, rows in tables(report):
        parts += ["", title, align(header, rows)]
    return "\n".join([*parts, "", *lines(report)])


def as_rich(report: Any) -> Any:
    """Renders a report with tables of rich. Only rich calls this function, so rich is installed."""
    from rich.console import Group
    from rich.text import Text

    parts: list[Any] = [Text(headline(report))]
    parts += [Text(f"Warning: {each}", style="bold yellow") for each in report.warnings]
    parts += [rich_table(header, rows, title) for title, header, rows in tables(report)]
    return Group(*parts, *map(Text, lines(report)))


def headline(report: Any) -> str:
    """One line with the function's name and cost."""
    whole = report.layers[0]
    return (
        f"{report.name}: {whole.operations:,} operations traced, {_with_plus(whole.flops, whole)} "
        f"FLOPs, {_with_plus(whole.transcendentals, whole)} transcendentals; "
        f"{sum(report.compiled.after.values()):,} instructions compiled"
    )


def tables(report: Any) -> list[Table]:
    """The tables of a report."""
    numbers = ("Operations", "Runs", "FLOPs", "Transcendentals", "Bytes")
    layers = tuple((*_cells(row), grouped(row.compiled)) for row in report.layers)
    instructions = tuple((kind, *map(grouped, counts)) for kind, *counts in report.compiled.changes)
    title = "Instructions before and after XLA's optimisations"
    found: list[Table] = [
        ("By layer", ("Layer", *numbers, "Compiled"), layers),
        ("By kind", ("Kind", *numbers), tuple(map(_cells, report.kinds))),
        (title, ("Instruction", "Before", "After"), instructions),
    ]
    if report.sides:
        header = ("Layer", "Operations", "With gradient", "FLOPs", "With gradient")
        header = (*header, "Backward pass", "Bytes stored")
        sides = ((side.name or "(all)", *map(grouped, _SIDE(side))) for side in report.sides)
        found.append(("Function and gradient", header, tuple(sides)))
    if report.unstable:
        header = ("Layer", "Formula", "Source", "Fails", "Write")
        fields = operator.attrgetter("layer", "name", "source", "fails", "instead")
        found.append(("Loses digits", header, tuple(map(fields, report.unstable))))
    return found


_SIDE = operator.attrgetter(
    "operations", "gradient_operations", "flops", "gradient_flops", "backward_flops", "stored_bytes"
)


def _cells(row: Row) -> tuple[str, ...]:
    numbers = (row.runs, row.flops, row.transcendentals, row.num_bytes)
    least = (_with_plus(number, row) for number in numbers)
    return (row.name or "(all)", grouped(row.operations), *least)


def _with_plus(number: int, row: Row) -> str:
    return f"{number:,}{'+' if row.is_least else ''}"


def lines(report: Any) -> list[str]:
    """The lines below the tables of a report."""
    compiled, redundant = report.compiled, report.redundant
    before, after = sum(compiled.before.values()), sum(compiled.after.values())
    fusions = ", ".join(f"{count} {kind}" for kind, count in compiled.fusions.items())
    intensity = "-" if report.intensity is None else f"{report.intensity:.2f}"
    constants = [
        f"{each.type} of {each.num_bytes:,} bytes"
        + (f" read at {each.source}" if each.source else "")
        for each in report.constants
    ]
    found = [
        f"XLA: {before:,} instructions before optimisation, {after:,} after, {compiled.fused:,} of "
        f"them in {sum(compiled.fusions.values()):,} fusions{f' ({fusions})' if fusions else ''}",
        f"Redundant as traced: {redundant.unused:,} unused, {redundant.common:,} computed twice, "
        f"{redundant.constant:,} on constants only",
        f"XLA's estimate: {grouped(report.xla_flops)} FLOPs, {grouped(report.xla_bytes)} bytes "
        f"moved, {intensity} FLOPs per byte",
    ]
    if (memory := report.memory) is not None:
        found.append(
            f"Memory: at most {memory.peak:,} bytes; arguments {memory.arguments:,}, outputs "
            f"{memory.outputs:,} ({memory.aliased:,} of them in buffers of arguments), "
            f"temporaries {memory.temporaries:,}"
        )
    found += [
        f"Arguments donated: {_listed(report.donated)}",
        f"Outputs in the buffers of arguments: "
        f"{_listed([f'{output} in {path}' for output, path in report.aliased])}",
        f"Constants: {_listed(constants)}",
        f"Callbacks and copies: "
        f"{_listed([f'{each.kind} at {each.source}' for each in report.effects])}",
        f"Collectives: {_collectives(report.collectives)}",
        f"Seconds: trace {report.trace_s:.3f}, lower {report.lower_s:.3f}, "
        f"compile {report.compile_s:.3f}",
    ]
    if any(row.is_least for row in report.layers[:1]):
        found.append(
            "+ means at least: the body of a while loop counts once, and operations of unknown "
            "cost count 0"
        )
    return found


def _listed(texts: Sequence[str], most: int = 4) -> str:
    more = [f"and {len(texts) - most:,} more"] if len(texts) > most else []
    return ", ".join([*texts[:most], *more]) or "none"


def _collectives(found: Sequence[Any]) -> str:
    counts = collections.Counter(each.kind for each in found)
    sizes: collections.Counter[str] = collections.Counter()
    for each in found:
        sizes[each.kind] += each.num_bytes
    return _listed([f"{count} {kind} of {sizes[kind]:,} bytes" for kind, count in counts.items()])


# --- A page of HTML ---


_TEMPLATE = pathlib.Path(__file__).with_name("template.html")


def page_of(report: Any) -> str:
    """Renders a report as a self-contained HTML page."""
    programs = {"Function": report.program}
    if report.gradient is not None:
        programs["With gradient"] = report.gradient.program
    graphs = {name: _graph(program) for name, program in programs.items()}
    parts = {
        "TITLE": html.escape(report.name),
        "HEADLINE": html.escape(headline(report)),
        "WARNINGS": html_warnings(report.warnings),
        "LINES": "".join(map(_line, lines(report))),
        "TABLES": "".join(
            f"<section><h2>{html.escape(title)}</h2>{html_table(header, rows)}</section>"
            for title, header, rows in tables(report)
        ),
        "GRAPHS": script_of(graphs),
    }
    return page_from(_TEMPLATE, parts)


def _line(text: str) -> str:
    name, colon, rest = text.partition(": ")
    name, value = (name, rest) if colon else ("", text)
    return f"<dt>{html.escape(name)}</dt><dd>{html.escape(value)}</dd>"


def _graph(program: Program) -> dict[str, Any]:
    """The data that the page's script draws: operations, edges and groups."""
    operations = [step.operation for step in program.steps]
    return {
        "operations": [
            [each.kind, each.output, each.work, each.times, each.source] for each in operations
        ],
        # Each edge is a pair of indices: of the operation that computes a value, and of an
        # operation that reads the value.
        "edges": [
            (source, index)
            for index, step in enumerate(program.steps)
            for source in dict.fromkeys(map(source_of, step.inputs))
            if source is not None
        ],
        "root": _nested(program),
    }


def _nested(program: Program) -> dict[str, Any]:
    """The program as nested groups: layers, loops and branches.

    Each group has three entries besides its name. `start` is the index of its first operation,
    `stop` is the index after its last operation, and `parts` has its operations and inner groups. A
    layer that is called twice becomes two groups.
    """
    root = {"name": "", "start": 0, "stop": len(program.steps), "parts": []}
    around: list[dict[str, Any]] = [root]
    for index, step in enumerate(program.steps):
        shared = 0
        for group, name in zip(around[1:], step.groups, strict=False):
            if group["name"] != name:
                break
            shared += 1
        del around[shared + 1 :]
        for name in step.groups[shared:]:
            group = {"name": name, "start": index, "stop": index, "parts": []}
            around[-1]["parts"].append(group)
            around.append(group)
        around[-1]["parts"].append(index)
        for group in around[1:]:
            group["stop"] = index + 1
    return root
