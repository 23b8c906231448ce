"""A report as text: tables and the lines around them."""

import collections
from collections.abc import Sequence
from typing import Any, NamedTuple

from .._tables import align, grouped, rich_table
from ._parts import Row

_MOST_KINDS = 12


class Table(NamedTuple):
    """A table with a line above it."""

    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def as_text(report: Any) -> str:
    """Tables and lines as plain text."""
    parts = [headline(report), *(f"Warning: {each}" for each in report.warnings)]
    for table in tables(report):
        parts += ["", table.title, align(table.header, table.rows)]
    return "\n".join([*parts, "", *lines(report)])


def as_rich(report: Any) -> Any:
    """The same with tables of rich, which asks for it and so is there."""
    from rich.console import Group
    from rich.text import Text

    parts: list[Any] = [Text(headline(report))]
    parts += [Text(f"Warning: {each}", style="bold yellow") for each in report.warnings]
    for table in tables(report):
        parts += [rich_table(table.header, table.rows, table.title)]
    return Group(*parts, *map(Text, lines(report)))


def headline(report: Any) -> str:
    """What the function is, and what it costs."""
    whole = report.layers[0]
    return (
        f"{report.name}: {whole.operations:,} operations traced, {_flops(whole)} FLOPs, "
        f"{_least(whole.transcendentals, whole)} transcendentals; "
        f"{sum(report.compiled.after.values()):,} instructions compiled"
    )


def tables(report: Any) -> list[Table]:
    """The tables of a report."""
    found = [
        Table(
            "By layer",
            ("Layer", "Operations", "Runs", "FLOPs", "Transcendentals", "Bytes", "Compiled"),
            tuple(
                (
                    row.name or "(all)",
                    grouped(row.operations),
                    _least(row.runs, row),
                    _flops(row),
                    _least(row.transcendentals, row),
                    _least(row.num_bytes, row),
                    grouped(row.compiled),
                )
                for row in report.layers
            ),
        ),
        Table(
            "By kind",
            ("Kind", "Operations", "Runs", "FLOPs", "Transcendentals", "Bytes"),
            tuple(
                (
                    row.name,
                    grouped(row.operations),
                    _least(row.runs, row),
                    _flops(row),
                    _least(row.transcendentals, row),
                    _least(row.num_bytes, row),
                )
                for row in _first_kinds(report.kinds)
            ),
        ),
        Table(
            "What XLA was given, and what it left",
            ("Instruction", "Before", "After"),
            tuple(
                (kind, grouped(before), grouped(after))
                for kind, before, after in _first_changes(report.compiled.changes)
            ),
        ),
    ]
    if report.sides:
        found.append(
            Table(
                "Function and gradient",
                (
                    "Layer",
                    "Operations",
                    "With gradient",
                    "FLOPs",
                    "With gradient",
                    "On the way back",
                    "Bytes stored",
                ),
                tuple(
                    (
                        side.name or "(all)",
                        grouped(side.operations),
                        grouped(side.gradient_operations),
                        grouped(side.flops),
                        grouped(side.gradient_flops),
                        grouped(side.backward_flops),
                        grouped(side.stored_bytes),
                    )
                    for side in report.sides
                ),
            )
        )
    return found


def lines(report: Any) -> list[str]:
    """What is said of a report below its tables."""
    compiled, redundant = report.compiled, report.redundant
    before, after = sum(compiled.before.values()), sum(compiled.after.values())
    fusions = ", ".join(f"{count} {kind}" for kind, count in compiled.fusions.items())
    found = [
        f"XLA: {before:,} instructions given, {after:,} left, {compiled.fused:,} of them in "
        f"{sum(compiled.fusions.values()):,} fusions{f' ({fusions})' if fusions else ''}",
        f"Redundant as traced: {redundant.unused:,} unused, {redundant.common:,} computed twice, "
        f"{redundant.constant:,} of constants alone",
        f"XLA's count: {grouped(report.xla_flops)} FLOPs, {grouped(report.xla_bytes)} bytes moved, "
        f"{_ratio(report.intensity)} FLOPs a byte",
    ]
    if (memory := report.memory) is not None:
        found.append(
            f"Memory: at most {memory.peak:,} bytes; arguments {memory.arguments:,}, outputs "
            f"{memory.outputs:,} ({memory.aliased:,} of them in arguments), temporaries "
            f"{memory.temporaries:,}"
        )
    found += [
        f"Arguments donated: {_some(report.donated)}",
        f"Outputs in the buffers of arguments: "
        f"{_some([f'{output} in {path}' for output, path in report.aliased])}",
        f"Constants: {_some([_constant(each) for each in report.constants])}",
        f"Callbacks and copies: "
        f"{_some([f'{each.kind} at {each.source}' for each in report.effects])}",
        f"Collectives: {_collectives(report.collectives)}",
        f"Seconds: trace {report.trace_s:.3f}, lower {report.lower_s:.3f}, "
        f"compile {report.compile_s:.3f}",
    ]
    if any(row.is_least for row in report.layers[:1]):
        found.append(
            "+ means at least: turns of a while loop count once, and not every operation has a "
            "known cost"
        )
    return found


def _first_kinds(rows: Sequence[Row]) -> list[Row]:
    """The first kinds, and the others in one row, so that a column adds up to the whole."""
    first, others = list(rows[:_MOST_KINDS]), rows[_MOST_KINDS:]
    if others:
        first.append(
            Row(
                name=f"{len(others)} more kinds",
                operations=sum(row.operations for row in others),
                runs=sum(row.runs for row in others),
                flops=sum(row.flops for row in others),
                transcendentals=sum(row.transcendentals for row in others),
                num_bytes=sum(row.num_bytes for row in others),
                is_least=any(row.is_least for row in others),
            )
        )
    return first


def _first_changes(changes: Sequence[tuple[str, int, int]]) -> list[tuple[str, int, int]]:
    first, others = list(changes[:_MOST_KINDS]), changes[_MOST_KINDS:]
    if others:
        before = sum(before for _, before, _ in others)
        after = sum(after for _, _, after in others)
        first.append((f"{len(others)} more kinds", before, after))
    return first


def _flops(row: Row) -> str:
    return _least(row.flops, row)


def _least(number: int, row: Row) -> str:
    return f"{number:,}{'+' if row.is_least else ''}"


def _ratio(number: float | None) -> str:
    return "-" if number is None else f"{number:.2f}"


def _some(texts: Sequence[str], most: int = 4) -> str:
    more = [f"and {len(texts) - most:,} more"] if len(texts) > most else []
    return ", ".join([*texts[:most], *more]) or "none"


def _constant(constant: Any) -> str:
    where = f" read at {constant.source}" if constant.source else ""
    return f"{constant.type} of {constant.num_bytes:,} bytes{where}"


def _collectives(found: Sequence[Any]) -> str:
    counts = collections.Counter(each.kind for each in found)
    sizes: collections.Counter[str] = collections.Counter()
    for each in found:
        sizes[each.kind] += each.num_bytes
    return _some([f"{count} {kind} of {sizes[kind]:,} bytes" for kind, count in counts.items()])
