"""Keys for static values: two values share a trace only if no program could tell them apart.

Python's `==` is not enough: `1 == 1.0 == True` and `0.0 == -0.0`, with equal hashes, and `nan` does
not equal itself. The rule, for a value of each cls:

- what hashes by identity is itself and nothing else, as for `jax.jit`, whatever it holds;
- numbers, strings and tuples are compared by value and type, dataclasses by their fields, partial
  functions and methods by their parts; what a method is bound to and is not hashable is itself;
- what has a `__hash__` of its own is compared by that and its own `==`, and by the types of the
  numbers among its attributes.
"""

import array
import collections
import dataclasses
import datetime
import decimal
import enum
import functools
import re
import struct
import types
from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import Any

import jax
import jax.tree_util as jtu
import numpy as np

from .._compat import PjitFunction
from .._module import Module, ModuleMeta
from .._pytree import is_array

# Compared by type and value: immutable, and equal values of one type are interchangeable.
_BY_VALUE = frozenset(
    {bool, int, str, bytes, type(None), type(Ellipsis), type(NotImplemented), np.dtype}
    # Of a method in C: by the identity of what it is bound to.
    | {types.BuiltinFunctionType}
)
# Compared by identity, though some of them have a `__hash__` of their own.
_BY_IDENTITY = (
    type,
    types.FunctionType,
    types.ModuleType,
    PjitFunction,
    jax.custom_jvp,
    jax.custom_vjp,
    np.ufunc,
    enum.Enum,
)
# Of what is hashable there, nothing changes.
_TRUSTED_PACKAGES = frozenset(
    {"jax", "jaxlib", "numpy", "ml_dtypes", "datetime", "fractions", "pathlib", "eqxlike"}
)

ATOMS = _BY_VALUE | {float, complex, types.FunctionType, PjitFunction}
"""Types of which every instance is a leaf of any pytree (or `None`), and immutable."""


PLAIN_TYPES = frozenset({type(None), bool, int, str, bytes, float})
"""Types of which many values have one key, made at the speed of C: see `plain_key`."""

_MIN_PLAIN = 32


def plain_key(values: tuple[Any, ...]) -> Hashable:
    """Tells these values, all of types in `PLAIN_TYPES`, from others."""
    types = (*map(type, values),)
    if float not in types:
        return types, values
    floats = [value for value in values if type(value) is float]
    others = (*(None if type(value) is float else value for value in values),)
    return types, others, struct.pack(f"{len(floats)}d", *floats)


class StaticKey:
    """Makes the key of one static value.

    - `key`: hashable; values with equal keys are interchangeable in a trace at this moment.
    - `is_immutable`: whether that will stay so; if not, the key must be made anew each time.
    - `is_exact`: whether the values with this key are interchangeable for good, and not just in
        what their `==` looks at.
    - `held`: objects that the key names by their `id`. Whoever keeps the key keeps these alive
        too, but not the other way round: a table of keys alone holds none of them.

    With `by_identity`, a value that is not hashable is itself and nothing else; with `by_elements`,
    it is a field of a dataclass that has a hash all the same.

    **Raises:** `TypeError` if the value is not hashable and is to be.
    """

    __slots__ = ("_compares_all", "_inside", "_value", "held", "is_immutable", "key")

    def __init__(self, value: Any, *, by_identity: bool = False, by_elements: bool = False):
        self.held: list[Any] = []
        self.is_immutable = True
        self._compares_all = True
        self._value = value
        self._inside: set[int] = set()
        make_key = self._identity if by_identity else self._of_elements if by_elements else self._of
        self.key = make_key(value)

    @property
    def is_exact(self) -> bool:
        return self._compares_all and self.is_immutable

    def is_current(self) -> bool:
        """Whether the value still has this key."""
        return self.is_immutable or StaticKey(self._value).key == self.key

    def _of(self, value: Any) -> Hashable:
        cls = type(value)
        if cls in _BY_VALUE:
            return cls, value
        if is_by_identity(value):
            return self._identity(value)
        if cls is tuple and len(value) >= _MIN_PLAIN and PLAIN_TYPES.issuperset(map(type, value)):
            return cls, plain_key(value)
        if isinstance(value, tuple):
            return cls, tuple(map(self._of, tuple.__iter__(value))), self._of_attributes(value)
        if isinstance(value, frozenset):
            return (
                cls,
                frozenset(map(self._of, frozenset.__iter__(value))),
                self._of_attributes(value),
            )
        for base, told_apart_by in _TOLD_APART_BY.items():
            if isinstance(value, base):
                return cls, told_apart_by(value), self._of_attributes(value)
        if cls is types.MethodType:
            # Made anew at each access to the attribute.
            return cls, self._of_bound(value.__func__), self._of_bound(value.__self__)
        if cls is functools.partial:
            # Its dict of keywords may be written to.
            self.is_immutable = False
            keywords = tuple(value.keywords.items())
            parts = tuple(map(self._of_part, (value.func, value.args, keywords)))
            return cls, parts, self._of_attributes(value)
        if cls in _PARTS:
            return cls, tuple(map(self._of_part, _PARTS[cls](value)))
        if cls.__hash__ is None:
            raise TypeError(f"unhashable type: {cls.__name__!r}")
        names = fields_compared(value)
        fields = None if names is None else [getattr(value, name, None) for name in names]
        if names is not None and len(names) != len(dataclasses.fields(value)):
            self._compares_all = False
        if fields is not None and (_is_generated(cls.__hash__) or all(map(is_hashable, fields))):
            self.is_immutable = self.is_immutable and is_frozen_by_class(cls)
            return cls, tuple(map(self._of, fields))
        hash(value)  # Raises if it cannot be.
        if fields is not None:
            # A hash of its own passes over fields that have none.
            self.is_immutable = self.is_immutable and is_frozen_by_class(cls)
            return cls, tuple(map(self._of_elements, fields))
        if _is_trusted(cls):
            return cls, value
        self.is_immutable = False
        # The hash tells of a change in place: any object is equal to itself.
        return cls, value, hash(value), types_of_numbers(value)

    def _identity(self, value: Any) -> Hashable:
        self.held.append(value)
        return "is", id(value)

    def _of_attributes(self, value: Any) -> Hashable:
        """Of a value of a class derived from one of Python's own: they are no part of its `==`."""
        if type(value) in _WITHOUT_ATTRIBUTES or id(value) in self._inside:
            return None
        if not hasattr(value, "__dict__") and not any(map(_slots, type(value).__mro__)):
            return None
        self.is_immutable = False
        self._inside.add(id(value))
        key = tuple((name, self._of_part(each)) for name, each in _attributes(value))
        self._inside.discard(id(value))
        return key

    def _of_bound(self, value: Any) -> Hashable:
        """Of a part of what is immutable: itself, if it is not hashable."""
        return self._of(value) if is_hashable(value) else self._identity(value)

    def _of_part(self, value: Any) -> Hashable:
        """For what a partial holds, which need not be hashable itself."""
        cls = type(value)
        if cls is tuple:
            return cls, tuple(map(self._of_part, value))
        if not is_array(value) and is_hashable(value):
            return self._of(value)
        base = next((base for base in _ELEMENTS if isinstance(value, base)), None)
        # A container too is itself: another may have the same elements now, and others later.
        identity = self._identity(value)
        if base is None:
            return identity
        self.is_immutable = False
        if id(value) in self._inside:
            return identity
        self._inside.add(id(value))
        key = identity, tuple(map(self._of_part, _ELEMENTS[base](value)))
        self._inside.discard(id(value))
        return *key, self._of_attributes(value)

    def _of_elements(self, value: Any) -> Hashable:
        """Of a container by its elements, as the equality of a dataclass that holds it has it.

        By these and their types, no deeper: `nnx.GraphDef` describes a whole model in two lists.
        """
        base = next((base for base in _ELEMENTS if isinstance(value, base)), None)
        if base is None:
            return self._of_bound(value)
        self.is_immutable = False
        return type(value), _Elements(
            self._of(each) if type(each) in ATOMS else (type(each), each)
            for each in _ELEMENTS[base](value)
        )


class _Elements(tuple):
    """Hashable whatever is inside."""

    __slots__ = ()

    def __hash__(self) -> int:
        return len(self)


_ELEMENTS: dict[type, Callable[[Any], Iterable[Any]]] = {
    list: iter,
    dict: lambda d: (*d, *d.values()),
    set: lambda s: (frozenset(s),),
    collections.deque: lambda d: (d.maxlen, *d),
    bytearray: lambda b: (bytes(b),),
    array.array: lambda a: (a.typecode, a.tobytes()),
}
"""What to look at in containers that are not hashable, subclasses included."""

_TOLD_APART_BY: dict[type, Callable[[Any], Hashable]] = {
    # Subclasses too: a subclass of `float` compares as one.
    np.generic: lambda scalar: (str(scalar.dtype), _bits(scalar)),
    float: lambda number: _bits(np.float64(number)),
    complex: lambda number: (_bits(np.float64(number.real)), _bits(np.float64(number.imag))),
    decimal.Decimal: decimal.Decimal.as_tuple,
    datetime.datetime: lambda time: (time.isoformat(), time.fold, _zone(time)),
    datetime.time: lambda time: (time.isoformat(), time.fold, _zone(time)),
    # Of these only subclasses, whose attributes are no part of their `==`.
    int: int.__index__,
    str: str.__str__,
    bytes: lambda text: bytes.__getitem__(text, slice(None)),
    # It compares `1` and `True` as equal, and prints them as they are; and addresses, of no matter.
    jtu.PyTreeDef: lambda treedef: (treedef, _ADDRESS.sub("", str(treedef))),
}


_ADDRESS = re.compile("0x[0-9a-f]+")


def _zone(time: datetime.datetime | datetime.time) -> Hashable:
    return type(time.tzinfo), str(time.tzinfo)


def is_by_identity(value: Any) -> bool:
    """Whether `value` is itself and nothing else."""
    if isinstance(value, _BY_IDENTITY):
        return True
    cls = type(value)
    return cls.__hash__ is object.__hash__ and cls is not functools.partial


def is_by_own_equality(value: Any) -> bool:
    """Whether `value`, which may change in place, is compared by what its class says alone."""
    has_parts = (tuple, frozenset, *_TOLD_APART_BY, *_PARTS, functools.partial, types.MethodType)
    return not isinstance(value, has_parts) and fields_compared(value) is None


def is_hashable(value: Any) -> bool:
    # The class alone does not say: a frozen dataclass is as hashable as its fields.
    try:
        hash(value)
    except TypeError:
        return False
    return True


def _bits(scalar: np.generic) -> Hashable:
    # All `nan`s of one sign are one; but `0.0` and `-0.0` are two.
    if isinstance(scalar, np.floating) and np.isnan(scalar):
        return "nan", bool(np.signbit(scalar))
    return scalar.tobytes()


_PARTS: dict[type, Callable[[Any], Iterable[Any]]] = {
    slice: lambda s: (s.start, s.stop, s.step),
    range: lambda r: (r.start, r.stop, r.step),
}

_WITHOUT_ATTRIBUTES = frozenset(
    {tuple, frozenset, float, complex, list, dict, set, bytearray}
    | {collections.deque, array.array, decimal.Decimal, datetime.datetime, datetime.time}
)


def fields_compared(value: Any) -> list[str] | None:
    """The fields by which two of the class of `value` are equal; `None` if it says otherwise.

    They are known of a Module, and of a dataclass, or a class below one, whose generated equality
    it has: then `C(1) == C(1.0)`.
    """
    if not isinstance(type(value), ModuleMeta) and _dataclass_parameters(type(value)) is None:
        return None
    return [field.name for field in dataclasses.fields(value) if field.compare]


def is_frozen_by_class(cls: type) -> bool:
    """Whether `cls`, of which the fields compared are known, lets nobody assign to them."""
    parameters = _dataclass_parameters(cls)
    return issubclass(cls, Module) or (parameters is not None and parameters.frozen)


def _dataclass_parameters(cls: type) -> Any:
    """Of the dataclass by whose generated equality two of `cls` are equal; or `None`."""
    owner = next(base for base in cls.__mro__ if "__eq__" in vars(base))
    return vars(owner).get("__dataclass_params__") if _is_generated(owner.__eq__) else None


def _is_generated(method: Any) -> bool:
    """Whether `dataclass` wrote this; one in the body of a class it leaves as it is."""
    code = getattr(method, "__code__", None)
    return code is not None and code.co_qualname.startswith("__create_fn__.")


def _is_trusted(cls: type) -> bool:
    return cls.__module__.partition(".")[0] in _TRUSTED_PACKAGES


_NUMBERS = frozenset({bool, int, float, complex})


def types_of_numbers(value: Any) -> Hashable:
    """Of the attributes of `value` that are numbers, or tuples that hold some, the types."""
    return tuple(
        (name, types)
        for name, each in _attributes(value)
        if (types := _number_types(each)) is not None
    )


def _number_types(value: Any) -> Hashable:
    if type(value) is tuple:
        inner = tuple(map(_number_types, value))
        return inner if any(each is not None for each in inner) else None
    return type(value) if type(value) in _NUMBERS or isinstance(value, np.generic) else None


def _attributes(value: Any) -> Iterator[tuple[str, Any]]:
    yield from getattr(value, "__dict__", {}).items()
    for base in type(value).__mro__:
        for slot in _slots(base):
            if hasattr(value, slot):
                yield slot, getattr(value, slot)


def _slots(base: type) -> list[str]:
    slots = vars(base).get("__slots__", ())
    slots = (slots,) if isinstance(slots, str) else slots
    prefix = f"_{base.__name__.lstrip('_')}"
    return [
        f"{prefix}{slot}" if slot.startswith("__") and not slot.endswith("__") else slot
        for slot in slots
        if slot not in ("__dict__", "__weakref__")
    ]
