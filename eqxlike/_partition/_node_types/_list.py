"""A plain list."""

from collections.abc import Sequence
from typing import Any

from .._guard import GuardWriter
from .._rebuild import RebuildWriter
from .._structure import Opened, Structure, no_meta
from ._tuple import guard_sequence


class ListNode(Structure):
    __slots__ = ()

    is_fixed = False
    takes_sequence = True

    @staticmethod
    def open(value: list[Any]) -> Opened:
        return Opened(ListNode, no_meta, None, value, "[{}]".format)

    def write_build(self, writer: RebuildWriter, parts: list[str]) -> str:
        return writer.assign(f"[*{parts[0]}]" if self.has_sequence else f"[{', '.join(parts)}]")

    def write_guard(self, writer: GuardWriter, name: str) -> Sequence[str]:
        return guard_sequence(self, writer, name)
