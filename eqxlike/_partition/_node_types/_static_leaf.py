"""A leaf that is no array, or `None`; its `meta` is its value."""

from typing import Any

from .._guard import GuardWriter
from .._rebuild import RebuildWriter
from .._static_key import StaticKey
from .._structure import Intern, Structure, intern


class StaticLeaf(Structure):
    __slots__ = ()

    is_leaf = True

    def write_build(self, writer: RebuildWriter, parts: list[str]) -> str:
        return writer.constant(self.meta)

    def write_guard(self, writer: GuardWriter, name: str) -> tuple[()]:
        writer.miss_if_static_differs(name, self.meta, of_node=False)
        return ()


def static_leaf(value: Any, make: Intern = intern) -> Structure:
    """The Structure of a static leaf. Raises `TypeError` if `value` is not hashable."""
    return make(StaticLeaf, type(value), lambda: value, StaticKey(value), ())


def identity_leaf(value: Any) -> Structure:
    """The Structure of a static leaf that is not hashable, and is compared by identity."""
    static = StaticKey(value, by_identity=True)
    return intern(StaticLeaf, type(value), lambda: value, static, ())


class _Opaque:
    """A stand-in for a value that may change; it hashes by identity."""

    __slots__ = ("of",)

    def __init__(self, value: Any):
        self.of = id(value)

    __hash__ = object.__hash__


def opaque_leaf(value: Any) -> Structure:
    """The Structure of a static leaf that is not hashable, shared with no other leaf."""
    static = StaticKey(_Opaque(value))
    static.is_immutable = False
    return intern(StaticLeaf, type(value), lambda: value, static, ())
