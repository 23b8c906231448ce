"""Generated code that checks whether a tree has a Structure, and takes its arrays.

This file only writes lines: each type of node knows what to check.
"""

import functools
import math
import types
from collections.abc import Hashable, Sequence
from typing import Any

from .._codegen import SourceWriter
from .._pytree import is_array
from ._static_key import (
    StaticKey,
    fields_compared,
    is_by_identity,
    is_by_own_equality,
    is_hashable,
    types_of_numbers,
)

_MAX_GUARDS = 4_000
"""After this many lines, each call flattens nodes by the general walk: compiling such a long
function takes longer than many such walks.
"""


class GuardWriter(SourceWriter):
    """Writes the guards of trees: lines that return `MISS` for any other tree.

    - `arrays`: the sources of the arrays of the trees, to be put between brackets.

    Each node is a `Structure`, which a file above this one defines.

    **Arguments:**

    - `flatten`: the general walk.
    - `arrays`: the arrays of an example, in order. The guards try their types first.
    - `miss`: the value to return for other trees.
    - `reads_fields`: whether to read the fields of Modules that may cache their partition.
    """

    def __init__(
        self, flatten: Any, arrays: Sequence[Any] | None, miss: Any, *, reads_fields: bool = False
    ):
        super().__init__({"MISS": miss, "flatten": flatten})
        self.arrays: list[str] = []
        self.reads_fields = reads_fields
        self._examples = arrays
        self._num_arrays = 0

    def write(self, root: Any, name: str) -> None:
        """Writes the guards of one tree, the value of `name`."""
        # An explicit stack: deep trees need no deep recursion.
        nodes: list[tuple[Any, str]] = [(root, name)]
        while nodes:
            node, name = nodes.pop()
            if len(self.lines) > _MAX_GUARDS:
                self.compare_by_walk(node, name)
                continue
            names = node.write_guard(self, name)
            if node.has_run:
                self._write_run(node.children[0], names[0], len(node.children))
                continue
            nodes += zip(reversed(node.children[: len(names)]), reversed(names), strict=True)

    def _write_run(self, child: Any, sequence: str, count: int) -> None:
        """Writes the guard of `count` nodes of one Structure, in a loop."""
        arrays, element = self.name("arrays"), self.name("x")
        before, self.arrays = self.arrays, []
        num_before = self._num_arrays
        self.miss_if(f"len({sequence}) != {count}")
        self.line(f"{arrays} = []")
        with self.block(f"for {element} in {sequence}:"):
            self.write(child, element)
            if child.num_arrays:
                self.line(f"{arrays} += ({', '.join(self.arrays)},)")
        self.arrays, self._num_arrays = before, num_before
        self.take_all(arrays, count * child.num_arrays)

    def compare_by_walk(self, structure: Any, name: str) -> None:
        """Writes the guard of a value that is flattened in each call."""
        dynamic, found = self.name("dynamic"), self.name("structure")
        self.line(f"{dynamic}, {found} = flatten({name})")
        self.miss_if(f"{found} is not {self.constant(structure)}")
        self.take_all(dynamic, structure.num_arrays)

    def take(self, name: str) -> Any:
        """Takes the value `name` as the next array; returns the example's array, or `None`."""
        self.arrays.append(name)
        self._num_arrays += 1
        return None if self._examples is None else self._examples[self._num_arrays - 1]

    def take_all(self, name: str, num_arrays: int) -> None:
        """Takes the values of the sequence `name` as the next arrays."""
        if num_arrays:
            self.arrays.append(f"*{name}")
            self._num_arrays += num_arrays

    def function(self, signature: str) -> list[str]:
        """The lines of a function that begins with the guards."""
        return [
            f"def {signature}:",
            "    try:",
            *(f"        {line}" for line in self.lines),
            # A value of another type may lack what the guards ask it for.
            "    except Exception:",
            "        return MISS",
        ]

    def miss_if(self, condition: str) -> None:
        self.line(f"if {condition}: return MISS")

    def unpack(self, source: str, count: int) -> list[str]:
        """Names for the `count` values of `source`; the line raises if there are more or fewer."""
        names = [self.name("x") for _ in range(count)]
        self.line(f"[{', '.join(names)}] = {source}")
        return names


# Generated code that checks whether a value has the key of a static value.
#
# Most static values are compared inline; for the rest the key is computed again. If the static
# value may change in place, and the other value is an equal object, both are checked: the compiled
# function holds the first.


_COMPARED = (int, str, bytes)

_MAX_UNPACKED = 31
"""Longer tuples are compared by their key, computed again."""


def write_static_guard(writer: GuardWriter, name: str, value: Any, *, of_node: bool) -> None:
    """Writes the guard that checks whether `name` could replace `value` in a trace.

    **Arguments:**

    - `of_node`: whether it is static in a node. A static leaf that is not hashable is compared by
      identity, a static part of a node by value.
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
        # Each access to the attribute makes a new method.
        _is_of_type(writer, name, types.MethodType)
        write_static_guard(writer, writer.assign(f"{name}.__func__"), value.__func__, of_node=False)
        write_static_guard(writer, writer.assign(f"{name}.__self__"), value.__self__, of_node=False)
    elif StaticKey(value, of_node=of_node).is_immutable:
        differs = f"{writer.constant(_key)}({name}) != {writer.constant(_key(value))}"
        writer.miss_if(f"{name} is not {writer.constant(value)} and {differs}")
    else:
        _is_unchanged(writer, name, value)


def _is_of_type(writer: GuardWriter, name: str, cls: type) -> None:
    writer.miss_if(f"type({name}) is not {writer.constant(cls)}")


def _is_same_float(writer: GuardWriter, name: str, value: float) -> None:
    if math.isnan(value):
        writer.miss_if(f"{name} == {name}")
    else:
        writer.miss_if(f"{name} != {writer.constant(value)}")
    if math.isnan(value) or value == 0.0:
        sign = writer.constant(math.copysign(1.0, value))
        writer.miss_if(f"{writer.constant(math.copysign)}(1.0, {name}) != {sign}")


def _is_unchanged(writer: GuardWriter, name: str, value: Any) -> None:
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


def _has_key_in_both(writer: GuardWriter, name: str, value: Any) -> None:
    same = writer.constant(value)
    _has_key_of(writer, name, value)
    with writer.block(f"if {name} is not {same}:"):
        _has_key_of(writer, same, value)


def _has_key_of(writer: GuardWriter, name: str, value: Any) -> None:
    writer.miss_if(f"{writer.constant(_key)}({name}) != {writer.constant(_key(value))}")


def _has_keywords(writer: GuardWriter, name: str, value: functools.partial) -> None:
    keywords = writer.assign(f"{name}.keywords")
    writer.miss_if(f"{name}.__dict__ or len({keywords}) != {len(value.keywords)}")
    for key, each in value.keywords.items():
        keyword = writer.assign(f"{keywords}[{key!r}]")
        if is_array(each):
            writer.miss_if(f"{keyword} is not {writer.constant(each)}")
        else:
            write_static_guard(writer, keyword, each, of_node=False)


def _has_fields(writer: GuardWriter, name: str, value: Any, fields: list[str]) -> None:
    for field in fields:
        each, part = getattr(value, field), writer.assign(f"{name}.{field}")
        if is_hashable(each):
            write_static_guard(writer, part, each, of_node=False)
        else:
            key = writer.constant(_key_by_elements(each))
            writer.miss_if(f"{writer.constant(_key_by_elements)}({part}) != {key}")


def _has_hash(writer: GuardWriter, name: str, value: Any) -> None:
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
    """Whether `value` has a key; a value without one is compared by identity."""
    try:
        StaticKey(value, of_node=of_node)
    except Exception:  # A `__hash__` may raise anything.
        return False
    return True


def _key(value: Any) -> Hashable:
    return StaticKey(value, of_node=True).key


def _key_by_elements(value: Any) -> Hashable:
    return StaticKey(value, by_elements=True).key
