"""Nodes of Python: tuples, lists, named tuples, dicts."""

import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

from jax.tree_util import default_registry

from .._guard import GuardWriter
from .._rebuild import RebuildWriter, tuple_of
from .._static_key import StaticKey
from .._structure import Opened, Structure, no_meta

# --- A plain tuple ---


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


# --- A plain list ---


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


# --- A namedtuple of a class that nobody has registered with JAX ---


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


# --- A plain dict ---


class _Meta(NamedTuple):
    """The keys as JAX sorts them, and in the order in which the first dict had them."""

    keys: tuple[Any, ...]
    as_inserted: tuple[Any, ...]


class DictNode(Structure):
    __slots__ = ()

    is_fixed = False
    takes_sequence = True

    @staticmethod
    def open(value: dict[Any, Any]) -> Opened:
        try:
            children, keys = default_registry.flatten_one_level(value)  # pyright: ignore
        except Exception as error:
            raise TypeError(
                "the keys of a dict in a pytree must be sortable: those of this one, of types "
                f"{', '.join(sorted({type(key).__name__ for key in value}))}, are not"
            ) from error

        def make_meta() -> _Meta:
            return _Meta(keys, tuple(value))

        return Opened(DictNode, make_meta, keys, children, lambda index: f"[{keys[index]!r}]")

    def write_build(self, writer: RebuildWriter, parts: list[str]) -> str:
        keys = self.meta.keys
        if self.has_sequence:
            return writer.assign(f"dict(zip({writer.constant(keys)}, {parts[0]}))")
        items = (f"{writer.constant(key)}: {part}" for key, part in zip(keys, parts, strict=True))
        return writer.assign(f"{{{', '.join(items)}}}")

    def write_guard(self, writer: GuardWriter, name: str) -> Sequence[str]:
        writer.miss_if(f"type({name}) is not dict")
        keys = self.meta.keys
        if all(type(key) is str for key in keys):
            # A missing key is noticed when its value is taken.
            differ = f"{{*map(type, {name})}} != {writer.constant({str})}"
        else:
            key = writer.constant(self.static.key)
            differ = f"not {writer.constant(_have_key)}({name}, {key})"
        if self.has_sequence:
            writer.miss_if(f"len({name}) != {len(keys)} or {differ}")
            return [writer.assign(f"{writer.constant(operator.itemgetter(*keys))}({name})")]
        found = writer.unpack(name, len(keys))
        if keys:
            # Mostly they are the same objects, and so of the same types, in the first dict's order.
            pairs = zip(found, map(writer.constant, self.meta.as_inserted), strict=True)
            writer.miss_if(f"({' or '.join(f'{x} is not {c}' for x, c in pairs)}) and {differ}")
        return [writer.assign(f"{name}[{writer.constant(key)}]") for key in keys]


def _have_key(value: dict[Any, Any], key: Any) -> bool:
    """Whether the keys of a dict, types included, have this `key`."""
    return StaticKey(tuple(sorted(value))).key == key
