"""A plain tuple."""

from collections.abc import Sequence
from typing import Any

from .._guard import GuardWriter
from .._rebuild import RebuildWriter, tuple_of
from .._structure import Opened, Structure, no_meta


class TupleNode(Structure):
    __slots__ = ()

    takes_sequence = True

    @staticmethod
    def open(value: tuple[Any, ...]) -> Opened:
        return Opened(TupleNode, no_meta, None, value, "[{}]".format)

    def write_build(self, writer: RebuildWriter, parts: list[str]) -> str:
        return writer.assign(f"tuple({parts[0]})" if self.has_sequence else tuple_of(parts))

    def write_guard(self, writer: GuardWriter, name: str) -> Sequence[str]:
        return guard_sequence(self, writer, name)


def guard_sequence(structure: Structure, writer: GuardWriter, name: str) -> Sequence[str]:
    """Writes the guard of a plain tuple or list."""
    writer.miss_if(f"type({name}) is not {writer.constant(structure.node_type)}")
    if structure.has_sequence:
        return [name]
    return writer.unpack(name, len(structure.children))
