"""The warm call: a function generated for one combination of Structures.

It looks whether the arguments are of these Structures and hands their arrays to JAX, with nothing
looked up, hashed or allocated that the call does not need. Anything else gets `MISS`.
"""

from collections.abc import Callable
from typing import Any

from .._codegen import compile_function
from .._module import is_incomplete
from .._partition import (
    ARRAY,
    ArrayLeaf,
    DictNode,
    ListNode,
    ModuleNode,
    NamedTupleNode,
    StaticKey,
    StaticLeaf,
    Structure,
    TupleNode,
    concrete_array_types,
    flatten,
)

MISS = object()
"""What a fast path returns for arguments that it was not made for."""

_MAX_DEPTH = 16
"""Containers deeper than this are flattened by the general walk."""


def always_miss(args: tuple[Any, ...]) -> Any:
    """The fast path of a function that has not been called yet."""
    return MISS


FastPath = Callable[[tuple[Any, ...]], Any]


def make_fast_path(
    structures: tuple[Structure, ...],
    examples: tuple[Any, ...],
    jitted: Callable[..., Any],
    outcome: Structure,
    finish: Callable[[Any], Any],
    restore_warnings: list[Callable[[], None]] | None,
) -> FastPath:
    """The function from arguments of these Structures to the outcome of the user's function.

    **Arguments:**

    - `structures`: the Structure of each argument.
    - `examples`: arguments that have these Structures, from which the types of arrays are taken.
    - `jitted`: called with the arrays of all arguments, in order.
    - `outcome`: what to build where `jitted` returns a plain tuple, or a bare array.
    - `finish`: called with the result of `jitted` in all other cases.
    - `restore_warnings`: what to call, if it is not empty, once `jitted` has returned; `None` where
        it always is empty.
    """
    generator = _Generator(jitted, outcome, finish, restore_warnings)
    return generator.generate(structures, examples)


_COMPARED = (int, str, bytes, float)


def _is_one_comparison(value: Any) -> bool:
    """Whether one comparison tells `value` from all other static values.

    Not so for `0.0` and `nan`, nor for what may change in place.
    """
    if type(value) is float:
        return value == value and value != 0.0
    return type(value) in _COMPARED or StaticKey(value, by_contents=True).is_immutable


class _Generator:
    def __init__(
        self,
        jitted: Callable[..., Any],
        outcome: Structure,
        finish: Callable[[Any], Any],
        restore_warnings: list[Callable[[], None]] | None,
    ):
        self.guards: list[str] = []
        self.arrays: list[str] = []
        self.outcome = outcome
        self.namespace: dict[str, Any] = {
            "MISS": MISS,
            "flatten": flatten,
            "array_types": concrete_array_types,
            "jitted": jitted,
            "rebuild": outcome.rebuilder(keep=True),
            "finish": finish,
            "restore_warnings": restore_warnings,
        }
        self.num_names = 0

    def generate(self, structures: tuple[Structure, ...], examples: tuple[Any, ...]) -> FastPath:
        names = [self._name("x") for _ in structures]
        self._guard(f"len(args) != {len(names)}")
        if names:
            self.guards.append(f"({', '.join(names)},) = args")
        for name, structure, example in zip(names, structures, examples, strict=True):
            self._argument(name, structure, example, 0)
        lines = [
            "def call(args):",
            "    try:",
            *(f"        {line}" for line in self.guards),
            # An argument of another kind may lack what the guards ask it for.
            "    except Exception:",
            "        return MISS",
        ]
        call = f"result = jitted({', '.join(self.arrays)})"
        if self.namespace["restore_warnings"] is None:
            lines.append(f"    {call}")
        else:
            lines += ["    try:", f"        {call}", "    finally:"]
            lines.append("        if restore_warnings: restore_warnings.pop()()")
        # Inside another transformation, concrete arguments may give tracers: `finish` sees to them.
        if self.outcome is ARRAY:
            lines.append("    if type(result) in array_types: return result")
        elif self.outcome.num_arrays:
            lines.append("    if type(result) is tuple and type(result[0]) in array_types:")
            lines.append("        return rebuild(result)")
        else:
            lines.append("    if type(result) is tuple: return rebuild(result)")
        lines.append("    return finish(result)")
        return compile_function(lines, self.namespace, "fast path")

    def _argument(self, name: str, structure: Structure, example: Any, depth: int) -> None:
        match structure:
            case ArrayLeaf():
                kind = self._constant(type(example))
                self._guard(f"type({name}) is not {kind} and type({name}) not in array_types")
                self.arrays.append(name)
            case StaticLeaf() if _is_one_comparison(structure.meta):
                self._guard(self._static_differs(name, structure.meta))
            case ModuleNode() if structure.is_keepable:
                kept, dynamic = self._name("kept"), self._name("dynamic")
                self.guards.append(f"{dynamic}, {kept} = {name}._eqxlike_kept")
                self._guard(f"{kept} is not {self._constant(structure)}")
                self._arrays_of(dynamic, structure)
            case ModuleNode() if depth < _MAX_DEPTH and self._can_read_fields(structure):
                self._fields(name, structure, example, depth)
            case TupleNode() | NamedTupleNode() | ListNode() if depth < _MAX_DEPTH:
                self._children(name, structure, example, depth)
            case DictNode() if depth < _MAX_DEPTH and all(type(k) is str for k in structure.meta):
                self._items(name, structure, example, depth)
            case _:
                spec, dynamic = self._name("spec"), self._name("dynamic")
                self.guards.append(f"{dynamic}, {spec} = flatten({name})")
                self._guard(f"{spec} is not {self._constant(structure)}")
                self._arrays_of(dynamic, structure)

    def _static_differs(self, name: str, value: Any) -> str:
        """The condition under which `name` is another static value than `value`."""
        if value is None or value is True or value is False:
            return f"{name} is not {value!r}"
        if type(value) in _COMPARED:
            kind = self._constant(type(value))
            return f"type({name}) is not {kind} or {name} != {self._constant(value)}"
        # An equal object of another identity goes the long way.
        return f"{name} is not {self._constant(value)}"

    def _can_read_fields(self, structure: Structure) -> bool:
        return not is_incomplete(structure.meta) and all(map(_is_one_comparison, structure.meta))

    def _fields(self, name: str, structure: Structure, example: Any, depth: int) -> None:
        """A Module that keeps nothing, since a list or a dict stands in it."""
        codec = structure.kind._eqxlike_codec  # pyright: ignore[reportAttributeAccessIssue]
        self._guard(f"type({name}) is not {self._constant(structure.kind)}")
        for field, value in zip(codec.static_names, structure.meta, strict=True):
            self._guard(self._static_differs(f"{name}.{field}", value))
        for field, child in zip(codec.dynamic_names, structure.children, strict=True):
            child_name = self._name("x")
            self.guards.append(f"{child_name} = {name}.{field}")
            self._argument(child_name, child, getattr(example, field), depth + 1)

    def _children(self, name: str, structure: Structure, example: Any, depth: int) -> None:
        kind, count = self._constant(structure.kind), len(structure.children)
        self._guard(f"type({name}) is not {kind} or len({name}) != {count}")
        names = [self._name("x") for _ in structure.children]
        if names:
            self.guards.append(f"({', '.join(names)},) = {name}")
        for child_name, child, child_example in zip(
            names, structure.children, example, strict=True
        ):
            self._argument(child_name, child, child_example, depth + 1)

    def _items(self, name: str, structure: Structure, example: Any, depth: int) -> None:
        kind, count = self._constant(structure.kind), len(structure.children)
        self._guard(f"type({name}) is not {kind} or len({name}) != {count}")
        for key, child in zip(structure.meta, structure.children, strict=True):
            child_name = self._name("x")
            self.guards.append(f"{child_name} = {name}[{key!r}]")
            self._argument(child_name, child, example[key], depth + 1)

    def _arrays_of(self, dynamic: str, structure: Structure) -> None:
        if structure.num_arrays:
            self.arrays.append(f"*{dynamic}")

    def _guard(self, differs: str) -> None:
        self.guards.append(f"if {differs}: return MISS")

    def _name(self, stem: str) -> str:
        self.num_names += 1
        return f"{stem}{self.num_names}"

    def _constant(self, value: Any) -> str:
        name = self._name("c")
        self.namespace[name] = value
        return name
