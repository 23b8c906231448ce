"""Outlines: what a Structure says, in text.

A Structure holds the static values of arguments themselves, closures with arrays among them. An
outline holds texts, and so may be kept when the arguments are gone. Each Structure has one outline
for as long as it lives, which has the outlines of its children: what the arguments of two traces
have in common takes no memory twice, and is known to be equal at a glance.
"""

import contextlib
import dataclasses
import functools
import itertools
import os
import reprlib
import types
import weakref
from collections.abc import Hashable, Iterable, Sequence
from typing import Any, Literal, TypeVar

import jax
import jax.tree_util as jtu

from ...._module import frozen_fields, is_incomplete
from ...._partition import (
    ARRAY,
    PLAIN_TYPES,
    DictNode,
    ForeignNode,
    ModuleNode,
    NamedTupleNode,
    StaticKey,
    StaticLeaf,
    Structure,
)
from ...._pytree import children_with_keys, is_array

_MAX_ELEMENTS = 64
"""A static container with more elements is not looked into; inside others, a fourth of them."""

_DEEPEST = 3
"""A static container inside so many others is not looked into."""

_KEY = "outline"

_OF_WRAPPER = "_function"
"""The field of transformed functions that has the function itself, of which the user knows."""

FROZEN = " with frozen "
"""Between the name of a class and its frozen fields, which make it another class."""

_Form = TypeVar("_Form")


@dataclasses.dataclass(eq=False, slots=True)
class Outline:
    """The outline of an argument, or of a part of one.

    - `kind`: whether it is an array, a static value, or a node of a pytree.
    - `text`: the static value; for a node, the name of its type, and its frozen fields.
    - `fingerprint`: differs where two static values, or the types of two nodes, do. A value that is
      compared by identity has one that no other ever has.
    - `names`: the names of the children in a path; `None` for a sequence.
    - `children`: the outlines of the children; those of a static value are its elements.
    - `num_arrays`: the number of arrays inside.
    - `advice`: a word for what a static value is: see `_differences`.
    """

    kind: Literal["array", "static", "node"]
    text: str
    fingerprint: Hashable
    names: tuple[str, ...] | None = ()
    children: "tuple[Outline, ...]" = ()
    num_arrays: int = 0
    advice: str = "value"

    @property
    def is_sequence(self) -> bool:
        return self.names is None

    def child_names(self) -> Iterable[str]:
        names = self.names
        return (f"[{i}]" for i in range(len(self.children))) if names is None else names

    def parts(self, forms: tuple[_Form, ...]) -> list[tuple["Outline", tuple[_Form, ...]]]:
        """The children, each with those of the forms of all arrays that are its own."""
        found, start = [], 0
        for child in self.children:
            found.append((child, forms[start : start + child.num_arrays]))
            start += child.num_arrays
        return found

    def describe(self) -> str:
        """The outline in a message, where what it is compared with is something else."""
        if self.kind == "static":
            return "None" if self.text == "None" else f"the static value {self.text}"
        return f"a {self.text} of length {len(self.children)}" if self.is_sequence else self.text


_OF_ARRAY = Outline("array", "array", None, num_arrays=1)


def root_outline(labels: Iterable[str], arguments: Iterable[Outline]) -> Outline:
    """The outline of all arguments of a call, under the names that they have there."""
    children = tuple(arguments)
    num_arrays = sum(child.num_arrays for child in children)
    return Outline("node", "arguments", None, tuple(labels), children, num_arrays)


def outline_of(structure: Structure) -> Outline:
    """The outline of a Structure, made on first use."""
    # The walk takes no Python stack: a tree may be as deep as `flatten` allows.
    stack = [structure]
    while stack:
        top = stack[-1]
        missing = [] if _KEY in top.generated else [c for c in top.children if _lacks(c)]
        if missing:
            stack += missing
        else:
            stack.pop()
            if _KEY not in top.generated:
                # Of two threads, both take the one that comes first.
                top.generated.setdefault(_KEY, _outline_one(top))
    return structure.generated[_KEY]


def _lacks(structure: Structure) -> bool:
    return not structure.is_row and _KEY not in structure.generated


def _outline_one(structure: Structure) -> Outline:
    if structure is ARRAY:
        return _OF_ARRAY
    if isinstance(structure, StaticLeaf):
        return outline_of_static(structure.meta, structure.static)
    cls = structure.node_type
    text = "None" if cls is type(None) else cls.__name__
    if frozen := frozen_fields(cls) if isinstance(structure, ModuleNode) else ():
        text += FROZEN + ", ".join(frozen)
    row = structure.children[0].meta if structure.has_row else None
    names, statics = _names_and_statics(structure, len(row.leaves if row else structure.children))
    more = tuple(outline_of_static(value, of_node=True) for value in statics.values())
    if row:
        places = set(row.array_places)
        leaves = enumerate(row.leaves)
        own = (_OF_ARRAY if i in places else outline_of_static(x) for i, x in leaves)
    else:
        own = (child.generated[_KEY] for child in structure.children)
    names = None if names is None else (*names, *statics)
    return Outline("node", text, _serial_of(cls), names, (*own, *more), structure.num_arrays)


def _names_and_statics(
    structure: Structure, num_children: int
) -> tuple[Iterable[str] | None, dict[str, Any]]:
    """The names of the children of a node, and its static parts by name."""
    cls: Any = structure.node_type
    meta = structure.meta
    if isinstance(structure, ModuleNode) and not is_incomplete(meta):
        codec = cls._eqxlike_class.codec
        names = ["" if name == _OF_WRAPPER else f".{name}" for name in codec.dynamic_names]
        static_names = map(".{}".format, codec.static_names)
        return names, dict(zip(static_names, meta, strict=True))
    if isinstance(structure, DictNode):
        return [f"[{key!r}]" for key in meta.keys], {}
    if isinstance(structure, NamedTupleNode):
        return [f".{name}" for name in cls._fields], {}
    if isinstance(structure, ForeignNode):
        return _foreign_names(meta.treedef, num_children), {" (static part)": meta.data}
    return None, {}


def _foreign_names(treedef: Any, num_children: int) -> Iterable[str]:
    """The names that the class of a foreign node gives to its children, if it does."""
    try:
        children = children_with_keys(treedef.unflatten(range(num_children)))
        names = {jtu.keystr((key,)): None for key, _ in children}
    except Exception:  # It need not expect anything but its own children.
        names = {}
    return names if len(names) == num_children else [f"[{i}]" for i in range(num_children)]


# --- Static values: their texts, and fingerprints by which they are compared ---


def outline_of_static(
    value: Any, static: StaticKey | None = None, *, of_node: bool = False, depth: int = 0
) -> Outline:
    """The outline of a static value, and of its elements if it is a small container.

    **Arguments:**

    - `static`: its key, if it is known.
    - `of_node`: whether it is static in a node, where it need not be hashable.
    """
    if type(value) in PLAIN_TYPES:
        # Of these there may be thousands. Text tells numbers apart whose hashes are equal: -1 and
        # -2, 0.0 and -0.0.
        text, advice = repr(value), "field" if of_node else "value"
        if depth == 0 and not of_node and type(value) in (int, float):
            advice = "number"
        fingerprint = type(value).__name__, hash(text)
        text = text if len(text) <= _LONGEST else describe_static(value)
        return Outline("static", text, fingerprint, advice=advice)
    if is_array(value):
        text = f"an array {jax.typeof(value)}"
        return Outline("static", text, _serial_of(value), advice="object")
    try:
        static = StaticKey(value, of_node=of_node or depth > 0) if static is None else static
        fingerprint = (_hash_of(static.key), *map(_serial_of, static.held))
    except Exception:
        static, fingerprint = None, _serial_of(value)
    names, parts = (), ()
    with contextlib.suppress(Exception):  # A class may do what it likes in its attributes.
        found = _elements(value)
        if depth < _DEEPEST and len(found[1]) <= _MAX_ELEMENTS >> 2 * depth:
            names, parts = found
    return Outline(
        "static",
        describe_static(value),
        (type(value).__name__, fingerprint),
        names,
        tuple(outline_of_static(part, of_node=of_node, depth=depth + 1) for part in parts),
        advice=_advice_on(value, static, of_node=of_node, is_whole=depth == 0),
    )


def _hash_of(key: Hashable) -> int:
    """The hash of the key of a static value, which differs where numbers do: Python has one for -1
    and -2.
    """
    if isinstance(key, tuple | frozenset):
        return hash(type(key)(map(_hash_of, key)))
    return hash(repr(key) if type(key) in (int, float, complex) else key)


_serial = itertools.count()
_serials: dict[int, tuple[weakref.ref[Any], int]] = {}


def _serial_of(value: Any) -> int:
    """A number that no other object has or will have: an `id` is given again to another."""
    place = id(value)
    found = _serials.get(place)
    if found is not None and found[0]() is value:
        return found[1]

    def forget(reference: weakref.ref[Any]) -> None:
        if place in _serials and _serials[place][0] is reference:
            del _serials[place]

    serial = next(_serial)
    try:
        _serials[place] = weakref.ref(value, forget), serial
    except TypeError:
        # It takes no weak reference. What it was traced for holds it, so that as a rule no other
        # object has its place; no serial is negative.
        return -place
    return serial


def _elements(value: Any) -> tuple[tuple[str, ...] | None, Sequence[Any]]:
    """The names, `None` for those of a sequence, and the elements of a container; else nothing."""
    if isinstance(value, functools.partial):
        return (".func", ".args", ".keywords"), (value.func, value.args, value.keywords)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in dataclasses.fields(value)]
        parts = [getattr(value, name, None) for name in names]
        return tuple(map(".{}".format, names)), parts
    if isinstance(value, dict):
        return tuple(f"[{describe_static(key)}]" for key in value), list(value.values())
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return tuple(map(".{}".format, value._fields)), value  # pyright: ignore
    return (None, value) if isinstance(value, list | tuple) else ((), ())


def _advice_on(value: Any, static: StaticKey | None, *, of_node: bool, is_whole: bool) -> str:
    if _function_of(value) is not None:
        return "function"
    if isinstance(value, type):
        return "class"
    if static is None or static.held:
        return "object"
    if of_node:
        return "field"
    is_number = isinstance(value, int | float | complex) and not isinstance(value, bool)
    return "number" if is_number and is_whole else "value"


# --- Short texts for what is static: values, functions, and places in files ---


_LONGEST = 200
"""At most this many characters of a value are kept."""

_MAX_WRAPPERS = 8
"""At most this many wrappers are opened to find a function: `jax.nn.relu` is in two."""

_short_repr = reprlib.Repr()
_short_repr.maxlevel = 3
_short_repr.maxlist = _short_repr.maxtuple = _short_repr.maxdict = 32
_short_repr.maxset = _short_repr.maxfrozenset = 32
_short_repr.maxstring = _short_repr.maxother = _short_repr.maxlong = _LONGEST


def describe_static(value: Any) -> str:
    """A short text for a static value. Nothing that its own `__repr__` does can fail."""
    try:
        text = _describe(value)
    except Exception:
        return f"<{type(value).__name__}>"
    return text if len(text) <= _LONGEST else text[:_LONGEST] + "..."


def _describe(value: Any) -> str:
    if (function := _function_of(value)) is not None:
        code = function.__code__
        name = function.__qualname__.rpartition("<locals>.")[2]
        if "site-packages" in code.co_filename:
            return f"{name} ({function.__module__.partition('.')[0]})"
        return f"{name} ({show_place(code.co_filename, code.co_firstlineno)})"
    if isinstance(value, types.MethodType):
        return f"the method {value.__func__.__qualname__} of a {type(value.__self__).__name__}"
    if isinstance(value, type):
        return value.__qualname__
    if isinstance(value, functools.partial):
        return f"a partial of {describe_static(value.func)}"
    # JAX would wait for an array that the `repr` shows.
    attributes = getattr(value, "__dict__", None)
    if type(attributes) is dict and any(map(is_array, attributes.values())):
        return f"a {type(value).__name__}"
    return _short_repr.repr(value)


def _function_of(value: Any) -> types.FunctionType | None:
    """The function that a value is, or of which JAX has made it."""
    with contextlib.suppress(Exception):
        for _ in range(_MAX_WRAPPERS):
            if isinstance(value, types.MethodType):
                value = value.__func__
            if isinstance(value, types.FunctionType):
                return value
            value = None if isinstance(value, type) else getattr(value, "__wrapped__", None)
    return None


def show_place(file: str, line: int) -> str:
    """A file and a line; the file as seen from the current directory, if it is below that."""
    return f"{file.removeprefix(os.path.join(os.getcwd(), ''))}:{line}"
