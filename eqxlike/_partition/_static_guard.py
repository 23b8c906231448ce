"""Generated code that asks whether a value has the key of a static value.

Most static values are compared in line; for the rest the key is made again. If the static value may
change in place, and the value is another that equals it, both are checked: the compiled function
holds the first.
"""

import contextlib
import functools
import math
import types
from collections.abc import Hashable
from typing import Any, Protocol

from .._pytree import is_array
from ._attributes import types_of_numbers
from ._static_key import (
    StaticKey,
    fields_compared,
    is_by_identity,
    is_by_own_equality,
    is_hashable,
)


class Writer(Protocol):
    """A `GuardWriter`, as far as it is needed here."""

    def miss_if(self, condition: str) -> None: ...
    def assign(self, source: str) -> str: ...
    def unpack(self, source: str, count: int) -> list[str]: ...
    def constant(self, value: Any) -> str: ...
    def block(self, header: str) -> contextlib.AbstractContextManager[None]: ...


_COMPARED = (int, str, bytes)

_MAX_UNPACKED = 31
"""Longer tuples are compared by their key, which is made again."""


def write_static_guard(writer: Writer, name: str, value: Any, *, of_node: bool = False) -> None:
    """Writes the guard that asks whether `name` could stand for `value` in a trace.

    **Arguments:**

    - `of_node`: whether it is static in a node. A static leaf that is not hashable is compared by
      identity, and what is static in a node by value.
    """
    cls = type(value)
    if value is None or value is True or value is False:
        writer.miss_if(f"{name} is not {value!r}")
    elif cls in _COMPARED:
        _is_of_type(writer, name, cls)
        writer.miss_if(f"{name} != {writer.constant(value)}")
    elif cls is float:
        _is_of_type(writer, name, float)
        _is_same_float(writer, name, value)
    elif cls is tuple and len(value) <= _MAX_UNPACKED and _has_key(value, of_node):
        _is_of_type(writer, name, tuple)
        for part, each in zip(writer.unpack(name, len(value)), value, strict=True):
            write_static_guard(writer, part, each, of_node=of_node)
    elif is_by_identity(value) or not _has_key(value, of_node):
        writer.miss_if(f"{name} is not {writer.constant(value)}")
    elif cls is types.MethodType:
        # A method is made anew at each access to the attribute.
        _is_of_type(writer, name, types.MethodType)
        write_static_guard(writer, writer.assign(f"{name}.__func__"), value.__func__)
        write_static_guard(writer, writer.assign(f"{name}.__self__"), value.__self__)
    elif StaticKey(value, of_node=of_node).is_immutable:
        differs = f"{writer.constant(_key)}({name}) != {writer.constant(_key(value))}"
        writer.miss_if(f"{name} is not {writer.constant(value)} and {differs}")
    else:
        _is_unchanged(writer, name, value)


def _is_of_type(writer: Writer, name: str, cls: type) -> None:
    writer.miss_if(f"type({name}) is not {writer.constant(cls)}")


def _is_same_float(writer: Writer, name: str, value: float) -> None:
    if math.isnan(value):
        writer.miss_if(f"{name} == {name}")
    else:
        writer.miss_if(f"{name} != {writer.constant(value)}")
    if math.isnan(value) or value == 0.0:
        sign = writer.constant(math.copysign(1.0, value))
        writer.miss_if(f"{writer.constant(math.copysign)}(1.0, {name}) != {sign}")


def _is_unchanged(writer: Writer, name: str, value: Any) -> None:
    """Writes the guard of a `value` that may change in place.

    The value of `name` must hold what `value` held. If it is another object, `value` itself must
    still hold that too, because the compiled function holds `value`.
    """
    same = writer.constant(value)
    _is_of_type(writer, name, type(value))
    fields = fields_compared(value)
    if type(value) is functools.partial and _stays_but_for_keywords(value):
        with writer.block(f"if {name} is not {same}:"):
            _has_key_of(writer, name, value)
            _has_key_of(writer, same, value)
        _has_keywords(writer, name, value)
    elif not is_hashable(value):
        _has_key_in_both(writer, name, value)
    elif fields is not None and all(hasattr(value, field) for field in fields):
        _has_fields(writer, name, value, fields)
        with writer.block(f"if {name} is not {same}:"):
            _has_fields(writer, same, value, fields)
    elif is_by_own_equality(value):
        _has_hash(writer, name, value)
        with writer.block(f"if {name} is not {same}:"):
            writer.miss_if(f"not ({name} == {same})")
            _has_hash(writer, same, value)
    else:
        _has_key_in_both(writer, name, value)


def _has_key_in_both(writer: Writer, name: str, value: Any) -> None:
    same = writer.constant(value)
    _has_key_of(writer, name, value)
    with writer.block(f"if {name} is not {same}:"):
        _has_key_of(writer, same, value)


def _has_key_of(writer: Writer, name: str, value: Any) -> None:
    writer.miss_if(f"{writer.constant(_key)}({name}) != {writer.constant(_key(value))}")


def _has_keywords(writer: Writer, name: str, value: functools.partial) -> None:
    keywords = writer.assign(f"{name}.keywords")
    writer.miss_if(f"{name}.__dict__ or len({keywords}) != {len(value.keywords)}")
    for key, each in value.keywords.items():
        keyword = writer.assign(f"{keywords}[{key!r}]")
        if is_array(each):
            writer.miss_if(f"{keyword} is not {writer.constant(each)}")
        else:
            write_static_guard(writer, keyword, each)


def _has_fields(writer: Writer, name: str, value: Any, fields: list[str]) -> None:
    for field in fields:
        each, part = getattr(value, field), writer.assign(f"{name}.{field}")
        if is_hashable(each):
            write_static_guard(writer, part, each)
        else:
            key = writer.constant(_key_by_elements(each))
            writer.miss_if(f"{writer.constant(_key_by_elements)}({part}) != {key}")


def _has_hash(writer: Writer, name: str, value: Any) -> None:
    numbers = f"{writer.constant(types_of_numbers)}({name})"
    writer.miss_if(f"hash({name}) != {hash(value)}")
    writer.miss_if(f"{numbers} != {writer.constant(types_of_numbers(value))}")


def _stays_but_for_keywords(partial: functools.partial) -> bool:
    parts = (partial.func, *partial.args, *partial.keywords.values())
    return not vars(partial) and all(map(_stays, parts))


def _stays(part: Any) -> bool:
    """Whether neither a part of a partial nor its key can change."""
    return is_array(part) or (is_hashable(part) and StaticKey(part).is_immutable)


def _has_key(value: Any, of_node: bool) -> bool:
    """Whether `value` has a key; a value that has none is compared by identity."""
    try:
        StaticKey(value, of_node=of_node)
    except Exception:  # A `__hash__` may raise anything.
        return False
    return True


def _key(value: Any) -> Hashable:
    return StaticKey(value, of_node=True).key


def _key_by_elements(value: Any) -> Hashable:
    return StaticKey(value, by_elements=True).key
