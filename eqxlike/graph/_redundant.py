"""What a compiler can find superfluous in a traced program before it looks at shapes."""

from collections.abc import Hashable
from typing import NamedTuple

from ._operations import Program
from ._origins import Origin


class Redundant(NamedTuple):
    """Operations of the traced program that need not be run.

    - `unused`: those whose results nothing needs.
    - `common`: those that compute what another has computed.
    - `constant`: those whose inputs are all known when the program is compiled.
    """

    unused: int
    common: int
    constant: int


def redundant_in(program: Program) -> Redundant:
    """What is superfluous in a program; each operation counts once, in this order."""
    seen: dict[Hashable, int] = {}
    same: dict[int, int] = {}
    constant: set[int] = set()
    common = 0
    for index, step in enumerate(program.steps):
        if not step.is_needed or step.has_effect:
            continue

        def known_as(origin: Origin) -> Origin:
            kind, where = origin
            if kind == "operation":
                return kind, (same.get(where[0], where[0]), where[1])
            return origin

        inputs = tuple(map(known_as, step.inputs))
        if all(_is_constant(each, constant) for each in inputs):
            constant.add(index)
            continue
        key = (step.operation.kind, step.params, inputs)
        if seen.setdefault(key, index) != index:
            same[index] = seen[key]
            common += 1
    unused = sum(not step.is_needed for step in program.steps)
    return Redundant(unused, common, len(constant))


def _is_constant(origin: Origin, constant: set[int]) -> bool:
    kind, where = origin
    return kind in ("literal", "constant") or (kind == "operation" and where[0] in constant)
