"""A namedtuple of a class that nobody has registered with JAX."""

from collections.abc import Sequence
from typing import Any

from .._guard import GuardWriter
from .._rebuild import RebuildWriter, tuple_of
from .._structure import Opened, Structure, no_meta

as_tuple = tuple.__getitem__
"""Called with a slice, it gives the children as JAX sees them, even if `__iter__` is overridden."""


class NamedTupleNode(Structure):
    __slots__ = ()

    @staticmethod
    def open(value: Any) -> Opened:
        names = type(value)._fields
        children = as_tuple(value, slice(None))
        return Opened(NamedTupleNode, no_meta, None, children, lambda index: f".{names[index]}")

    def write_build(self, writer: RebuildWriter, parts: list[str]) -> str:
        cls = writer.constant(self.node_type)
        if _is_built_as_generated(self.node_type):
            return writer.assign(f"new_tuple({cls}, {tuple_of(parts)})")
        return writer.assign(f"{cls}({', '.join(parts)})")

    def write_guard(self, writer: GuardWriter, name: str) -> Sequence[str]:
        writer.miss_if(f"type({name}) is not {writer.constant(self.node_type)}")
        if self.node_type.__iter__ is not tuple.__iter__:  # pyright: ignore
            name = f"{writer.constant(as_tuple)}({name}, {writer.constant(slice(None))})"
        return writer.unpack(name, len(self.children))


def _is_built_as_generated(cls: Any) -> bool:
    """Whether calling the class, as JAX does, only makes the tuple."""
    new, init = cls.__new__, cls.__init__
    is_generated = getattr(new, "__module__", "") == f"namedtuple_{cls.__name__}"
    inherits = any(
        getattr(new, "__module__", "") == f"namedtuple_{base.__name__}" for base in cls.__mro__
    )
    return (is_generated or inherits) and init is object.__init__
