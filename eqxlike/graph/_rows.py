"""Sums over the operations of a program, by layer and by kind."""

import collections
from collections.abc import Callable, Iterable, Sequence

from ._hlo import Instruction
from ._operations import Operation, Program, Step
from ._origins import Origin, source_of
from ._parts import Row, Side, Stored
from ._scopes import path_of, scopes_in


def rows_by_layer(program: Program, instructions: Sequence[Instruction]) -> tuple[Row, ...]:
    """A row for the whole program, and one for each layer, in the order of their first calls."""
    groups = steps_by_layer(program)
    compiled = _instructions_by_layer(program, instructions)
    return tuple(_row(name, steps, compiled[name]) for name, steps in groups.items())


def rows_by_kind(program: Program) -> tuple[Row, ...]:
    """A row for each kind of operation, those that compute most first."""
    groups: dict[str, list[Step]] = {}
    for step in program.steps:
        groups.setdefault(step.operation.kind, []).append(step)
    rows = [_row(name, steps, None) for name, steps in groups.items()]
    return tuple(sorted(rows, key=lambda row: (-row.flops - row.transcendentals, -row.num_bytes)))


def steps_by_layer(program: Program) -> dict[str, list[Step]]:
    """The operations of each layer, by path, with those of the layers inside it."""
    groups: dict[str, list[Step]] = {"": []}
    for step in program.steps:
        for path in paths_around(step.scopes):
            groups.setdefault(path, []).append(step)
    # A layer stands before those inside it, and after the layers called earlier.
    return groups


def paths_around(scopes: tuple[str, ...]) -> list[str]:
    """The path of a layer and of those around it, outer ones first."""
    return list(dict.fromkeys(path_of(scopes[:depth]) for depth in range(len(scopes) + 1)))


def _row(name: str, steps: Sequence[Step], compiled: int | None) -> Row:
    operations = [step.operation for step in steps]

    def total(number: Callable[[Operation], int | None]) -> int:
        return sum(each.times * (number(each) or 0) for each in operations)

    return Row(
        name=name,
        operations=len(operations),
        runs=sum(each.times for each in operations),
        flops=total(lambda each: each.flops),
        transcendentals=total(lambda each: each.transcendentals),
        num_bytes=total(lambda each: each.num_bytes),
        is_least=any(each.is_in_while or each.flops is None for each in operations),
        compiled=compiled,
    )


def _instructions_by_layer(
    program: Program, instructions: Iterable[Instruction]
) -> collections.Counter[str]:
    known = {scope for step in program.steps for scope in step.scopes}
    found: collections.Counter[str] = collections.Counter()
    for each in instructions:
        # The last name is that of the operation.
        stack = each.op_name.rpartition("/")[0]
        scopes = tuple(scope for scope in scopes_in(stack) if scope in known)
        found.update(paths_around(scopes))
    return found


def stored_in(program: Program, outputs: Sequence[tuple[str, int]]) -> tuple[Stored, ...]:
    """The arrays, given by type and size, that a program returns for the way back.

    One that is returned twice counts once, as do arguments and constants not at all.
    """
    found: dict[Origin, Stored] = {}
    for origin, (type_, num_bytes) in zip(program.outputs, outputs, strict=True):
        source = source_of(origin)
        # A loop stacks what its turns pass on, an argument too: that is an array of its own.
        maker = origin[1][0] if origin[0] == "passed" else None
        if source is not None:
            maker = program.steps[source].operation
        if maker is not None:
            found.setdefault(origin, Stored(maker.layer, maker.kind, type_, num_bytes))
    return tuple(found.values())


def sides(function: Program, gradient: Program, stored: Iterable[Stored]) -> tuple[Side, ...]:
    """A function and its gradient beside each other, by layer."""
    there, back = steps_by_layer(function), steps_by_layer(gradient)
    scopes = {step.operation.layer: step.scopes for step in (*function.steps, *gradient.steps)}
    num_bytes: collections.Counter[str] = collections.Counter()
    for each in stored:
        for path in paths_around(scopes.get(each.layer, (each.layer,) if each.layer else ())):
            num_bytes[path] += each.num_bytes
    return tuple(
        Side(
            name=name,
            operations=len(there.get(name, ())),
            flops=_flops(there.get(name, ())),
            gradient_operations=len(back.get(name, ())),
            gradient_flops=_flops(back.get(name, ())),
            backward_flops=_flops(
                [step for step in back.get(name, ()) if step.operation.is_backward]
            ),
            stored_bytes=num_bytes[name],
        )
        for name in dict.fromkeys([*there, *back])
    )


def _flops(steps: Iterable[Step]) -> int:
    return sum(step.operation.times * (step.operation.flops or 0) for step in steps)
