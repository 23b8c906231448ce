"""Keys for static values: two values share a trace only if no program could distinguish them.

Python's `==` is not enough. `1 == 1.0 == True` and `0.0 == -0.0` hold, with equal hashes, and `nan`
does not equal itself. The rules are:

- values that hash by identity are compared by identity, whatever they contain, as in `jax.jit`;
- numbers, strings and tuples are compared by value and type, and dataclasses by their fields;
- partial functions and methods are compared by their parts. If the instance of a method is not
  hashable, the instance is compared by identity;
- values with their own `__hash__` are compared by `__hash__` and `==`. If an attribute is a number,
  its type must be equal too;
- in a static field, lists, dicts and other containers are compared by their elements, and other
  unhashable values by their attributes.
"""

import array
import collections
import dataclasses
import datetime
import decimal
import enum
import functools
import itertools
import math
import operator
import re
import struct
import types
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import Any

import jax
import jax.tree_util as jtu
import numpy as np

from .._compat import PjitFunction
from .._module import Module, ModuleMeta
from .._pytree import is_array

_BY_VALUE = frozenset(
    {bool, int, str, bytes, type(None), type(Ellipsis), type(NotImplemented), np.dtype}
    # A method written in C is of this type. Two such methods are equal only if they are bound to
    # the same object.
    | {types.BuiltinFunctionType}
)
"""Values of these types are immutable. Equal values of the same type are interchangeable."""

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
"""Values of these types are compared by identity, even if they have their own `__hash__`."""

_TRUSTED_PACKAGES = frozenset(
    {"jax", "jaxlib", "numpy", "ml_dtypes", "datetime", "fractions", "pathlib", "eqxlike"}
)
"""Hashable values of classes from these packages never change."""

ATOMS = _BY_VALUE | {float, complex, types.FunctionType, PjitFunction}
"""Every instance of these types is immutable. In a pytree, an instance is a leaf or `None`."""


PLAIN_TYPES = frozenset({type(None), bool, int, str, bytes, float})
"""Many values of these types together get a single key from `plain_key`, which is fast."""

_MIN_PLAIN = 32
"""A tuple of at least this many values of `PLAIN_TYPES` gets its key from `plain_key`."""


def plain_key(values: tuple[Any, ...]) -> Hashable:
    """A single key for all these values. Their types must be in `PLAIN_TYPES`."""
    types = (*map(type, values),)
    if float not in types:
        return types, values
    floats = [value for value in values if type(value) is float]
    others = (*(None if type(value) is float else value for value in values),)
    return types, others, struct.pack(f"{len(floats)}d", *floats)


class StaticKey:
    """The key of one static value, and its properties.

    - `key`: a hashable object. Values with equal keys are interchangeable in a trace at this
      moment.
    - `is_immutable`: `True` if the key stays valid. Otherwise it must be computed again each time.
    - `is_fixed`: `True` if the key stays valid as long as the `containers` do not change.
    - `containers`: the lists, dicts, sets and plain objects in the value, for a `Snapshot`.
    - `is_exact`: `True` if values with this key are interchangeable in every respect, not only in
      the parts that their `==` compares.
    - `held`: the objects whose `id` is part of `key`. The `StaticKey` keeps them alive; `key` alone
      does not.

    **Arguments:**

    - `by_identity`: if `True`, the value is compared by identity.
    - `by_elements`: if `True`, the value is an unhashable field of a hashable dataclass, and is
      compared by its elements.
    - `of_node`: if `True`, the value is the static part of a node, and every unhashable object in
      it is compared by value.

    **Raises:** `TypeError` if the value must be hashable and is not.
    """

    __slots__ = (
        "_inside",
        "_of_node",
        "_value",
        "containers",
        "held",
        "is_exact",
        "is_fixed",
        "is_immutable",
        "key",
    )

    def __init__(
        self,
        value: Any,
        *,
        by_identity: bool = False,
        by_elements: bool = False,
        of_node: bool = False,
    ):
        self.held: list[Any] = []
        self.containers: list[Container] = []
        self.is_immutable = True
        self.is_exact = True
        self._of_node = of_node
        self._value = value
        self._inside: set[int] = set()
        make_key = self._identity if by_identity else self._of_elements if by_elements else self._of
        self.key = make_key(value)
        self.is_fixed = self.is_immutable
        self.is_immutable &= not self.containers
        self.is_exact &= self.is_immutable

    def is_current(self) -> bool:
        """Whether the value still has this key."""
        if self.is_immutable:
            return True
        return StaticKey(self._value, of_node=self._of_node).key == self.key

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
            elements = frozenset(map(self._of, frozenset.__iter__(value)))
            return cls, elements, self._of_attributes(value)
        for base, distinguish in _DISTINGUISHED_BY.items():
            if isinstance(value, base):
                return cls, distinguish(value), self._of_attributes(value)
        if cls is types.MethodType:
            # Each access to a method makes a new object, so methods are compared by their parts.
            return cls, self._of_bound(value.__func__), self._of_bound(value.__self__)
        if cls is functools.partial:
            # The keywords of a partial are in a dict, which may change.
            self.is_immutable = False
            keywords = tuple(value.keywords.items())
            parts = tuple(map(self._of_part, (value.func, value.args, keywords)))
            return cls, parts, self._of_attributes(value)
        if cls in _RANGES:
            return cls, tuple(map(self._of_part, (value.start, value.stop, value.step)))
        if cls.__hash__ is None:
            return self._of_unhashable(value)
        names = fields_compared(value)
        if names is not None:
            self.is_exact &= len(names) == len(dataclasses.fields(value))
            self.is_immutable &= is_frozen_by_class(cls)
            fields = [getattr(value, name, None) for name in names]
            if _is_generated(cls.__hash__) or all(map(is_hashable, fields)):
                return cls, tuple(map(self._of, fields))
        hash(value)  # Raises if the value is not hashable.
        if names is not None:
            # Fields may be unhashable, since a custom `__hash__` may leave them out.
            return cls, tuple(map(self._of_elements, fields))
        if cls.__module__.partition(".")[0] in _TRUSTED_PACKAGES:
            return cls, value
        self.is_immutable = False
        # The hash is part of the key because it shows if `value` was changed in place. `==` does
        # not show the change, since any object equals itself.
        return cls, value, hash(value), types_of_numbers(value)

    def _of_unhashable(self, value: Any) -> Hashable:
        """The key of an unhashable value in the static part of a node."""
        cls = type(value)
        base = next((base for base in _ELEMENTS if isinstance(value, base)), None)
        if not self._of_node or is_array(value) or not (base or has_attributes(value)):
            raise TypeError(f"unhashable type: {cls.__name__!r}")
        if id(value) in self._inside:
            raise TypeError(f"a value of type {cls.__name__!r} contains itself")
        self._inside.add(id(value))
        # The key is made of the saved parts, and `value` is not read again. So the snapshot matches
        # the key even if another thread changes `value` in between.
        live = _live_parts(value, base)
        saved = [*map(tuple, live)]
        self.containers += [(value, *pair) for pair in zip(live, saved, strict=True)]
        if not live:
            self.is_immutable = False
            elements = _ELEMENTS[base](value) if base else ()
            attributes = () if cls in _WITHOUT_ATTRIBUTES else attributes_of(value)
        elif base is None:
            elements, attributes = (), zip(*saved[1:], strict=True)
        else:
            elements = map(frozenset, saved) if cls is set else itertools.chain(*saved)
            attributes = ()
        key = (
            cls,
            tuple(map(self._of, elements)),
            tuple((name, self._of(each)) for name, each in attributes),
        )
        self._inside.discard(id(value))
        return key

    def _identity(self, value: Any) -> Hashable:
        self.held.append(value)
        return "is", id(value)

    def _of_attributes(self, value: Any) -> Hashable:
        """The key of the attributes of a value.

        This key is needed if the `==` of the value ignores attributes, as in a subclass of `tuple`.
        """
        is_known = type(value) in _WITHOUT_ATTRIBUTES or id(value) in self._inside
        if is_known or not has_attributes(value):
            return None
        self.is_immutable = False
        self._inside.add(id(value))
        key = tuple((name, self._of_part(each)) for name, each in attributes_of(value))
        self._inside.discard(id(value))
        return key

    def _of_bound(self, value: Any) -> Hashable:
        """The key of a part of an immutable value. An unhashable part is compared by identity."""
        return self._of(value) if is_hashable(value) else self._identity(value)

    def _of_part(self, value: Any) -> Hashable:
        """The key of a part of a partial function. The part need not be hashable."""
        cls = type(value)
        if cls is tuple:
            return cls, tuple(map(self._of_part, value))
        if not is_array(value) and is_hashable(value):
            return self._of(value)
        base = next((base for base in _ELEMENTS if isinstance(value, base)), None)
        # An unhashable container is compared by identity and by its elements. Identity is needed
        # because another container with the same elements may have different elements later.
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
        """The key of an unhashable field of a dataclass, by its elements.

        The elements have no keys of their own; they are compared by type and `==`. This is faster
        than keys for the elements. The speed matters for `nnx.GraphDef`, which describes a whole
        model in two lists.
        """
        base = next((base for base in _ELEMENTS if isinstance(value, base)), None)
        if base is None:
            return self._of_bound(value)
        self.is_immutable = False
        return type(value), _Elements(
            self._of(each) if type(each) in ATOMS else (type(each), each)
            for each in _ELEMENTS[base](value)
        )


# --- Containers that may change, and a fast check that they have not ---


Container = tuple[Any, Any, tuple[Any, ...]]
"""A container, a live view of some of its parts, and a copy of these parts."""


class Snapshot:
    """The contents of some containers when their keys were made.

    Each part of a container is immutable, is compared by identity, or is itself a container in the
    snapshot. So a container is unchanged if its parts are the same objects. Comparing the parts by
    identity is fast. Equal snapshots are the same object, so that a call can skip a snapshot that
    it has already checked.
    """

    __slots__ = ("__weakref__", "_lengths", "_live", "_saved", "containers")

    def __init__(self, containers: list[Container]):
        self.containers = containers
        self._live = [live for _, live, _ in containers]
        self._lengths = [len(saved) for *_, saved in containers]
        self._saved = [*itertools.chain(*(saved for *_, saved in containers))]

    def is_current(self) -> bool:
        """Whether all containers hold the same objects, in the same order."""
        if [*map(len, self._live)] != self._lengths:
            return False
        try:
            return all(map(operator.is_, itertools.chain.from_iterable(self._live), self._saved))
        except RuntimeError:  # Another thread is changing a dict or a set.
            return False


_snapshots: weakref.WeakValueDictionary[Any, Snapshot] = weakref.WeakValueDictionary()


def snapshot_of(containers: Iterable[Container]) -> Snapshot:
    """The snapshot of these containers."""
    unique = {(id(each[0]), type(each[1]), *map(id, each[2])): each for each in containers}
    # The snapshot keeps the objects alive, so that no other object gets their `id`.
    return _snapshots.setdefault((*unique,), Snapshot([*unique.values()]))


class _Attributes:
    """A view of the class and `__dict__` of an object. It shows if either was reassigned."""

    __slots__ = ("of",)

    def __init__(self, of: Any):
        self.of = of

    def __len__(self) -> int:
        return 2

    def __iter__(self) -> Iterator[Any]:
        return iter((type(self.of), vars(self.of)))


def _live_parts(value: Any, base: type | None) -> tuple[Any, ...]:
    """Views that always show the current parts of a container; empty if no views are possible."""
    cls = type(value)
    if cls in (list, set):
        return (value,)
    if cls is dict:
        return value, value.values()
    attributes = getattr(value, "__dict__", None)
    if base is None and type(attributes) is dict and not any(map(_slots, cls.__mro__)):
        return _Attributes(value), attributes, attributes.values()
    return ()


class _Elements(tuple):
    """A tuple that is hashable even if its elements are not."""

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
"""For each type, a function that returns the elements of an unhashable container of this type or a
subclass.
"""

# --- How a value is compared ---


_DISTINGUISHED_BY: dict[type, Callable[[Any], Hashable]] = {
    np.generic: lambda scalar: (str(scalar.dtype), _bits(scalar)),
    float: lambda number: _bits(np.float64(number)),
    complex: lambda number: (_bits(np.float64(number.real)), _bits(np.float64(number.imag))),
    decimal.Decimal: decimal.Decimal.as_tuple,
    datetime.datetime: lambda time: (time.isoformat(), time.fold, _zone(time)),
    datetime.time: lambda time: (time.isoformat(), time.fold, _zone(time)),
    # These three entries are for subclasses. The `==` that they inherit ignores the attributes of
    # their instances.
    int: int.__index__,
    str: str.__str__,
    bytes: lambda text: bytes.__getitem__(text, slice(None)),
    # Two treedefs that differ only in `1` and `True` are equal, but their texts differ. The memory
    # addresses in a text are removed, since they do not matter.
    jtu.PyTreeDef: lambda treedef: (treedef, _ADDRESS.sub("", str(treedef))),
}
"""For each type, a function that returns all data by which two values of this type can differ. The
function also applies to subclasses, because they inherit `==`.
"""

_ADDRESS = re.compile("0x[0-9a-f]+")


def _zone(time: datetime.datetime | datetime.time) -> Hashable:
    return type(time.tzinfo), str(time.tzinfo)


def is_by_identity(value: Any) -> bool:
    """Whether `value` is compared by identity."""
    if isinstance(value, _BY_IDENTITY):
        return True
    cls = type(value)
    return cls.__hash__ is object.__hash__ and cls is not functools.partial


def is_by_own_equality(value: Any) -> bool:
    """Whether a mutable `value` is compared by its own `==` and hash, and not by its parts."""
    others = (tuple, frozenset, *_DISTINGUISHED_BY, *_RANGES, functools.partial, types.MethodType)
    return not isinstance(value, others) and fields_compared(value) is None


def is_hashable(value: Any) -> bool:
    """Returns `True` if `hash(value)` works."""
    # The class alone does not decide: a frozen dataclass is hashable only if its fields are
    # hashable.
    try:
        hash(value)
    except TypeError:
        return False
    return True


def _bits(scalar: np.generic) -> Hashable:
    # All `nan`s of the same sign are equal, but `0.0` and `-0.0` are different.
    if isinstance(scalar, np.floating) and np.isnan(scalar):
        return "nan", bool(np.signbit(scalar))
    return scalar.tobytes()


_RANGES = (slice, range)

_WITHOUT_ATTRIBUTES = frozenset(
    {tuple, frozenset, float, complex, list, dict, set, bytearray}
    | {collections.deque, array.array, decimal.Decimal, datetime.datetime, datetime.time}
)


def fields_compared(value: Any) -> list[str] | None:
    """The fields that `==` compares for objects of the class of `value`; `None` if unknown.

    The fields are known for a Module, and for a class whose `__eq__` was generated by `dataclass`,
    in the class or in a base class. With such an `__eq__`, `C(1) == C(1.0)`.
    """
    if not isinstance(type(value), ModuleMeta) and _dataclass_parameters(type(value)) is None:
        return None
    return [field.name for field in dataclasses.fields(value) if field.compare]


def is_frozen_by_class(cls: type) -> bool:
    """Whether `cls` prevents assignment to the fields that `fields_compared` returns."""
    parameters = _dataclass_parameters(cls)
    return issubclass(cls, Module) or (parameters is not None and parameters.frozen)


def _dataclass_parameters(cls: type) -> Any:
    """The options of the `@dataclass` that generated the `__eq__` of `cls`, or `None`."""
    owner = next(base for base in cls.__mro__ if "__eq__" in vars(base))
    return vars(owner).get("__dataclass_params__") if _is_generated(owner.__eq__) else None


def _is_generated(method: Any) -> bool:
    """Whether `dataclass` generated the method. `dataclass` keeps methods of the class body."""
    code = getattr(method, "__code__", None)
    return code is not None and code.co_qualname.startswith("__create_fn__.")


# --- The attributes of a value, in its `__dict__` and in the slots of its class ---


_NUMBERS = frozenset({bool, int, float, complex})


def types_of_numbers(value: Any) -> Hashable:
    """The types of all attributes of `value` that are numbers, or tuples that contain numbers."""
    return tuple(
        (name, types)
        for name, each in attributes_of(value)
        if (types := _number_types(each)) is not None
    )


def _number_types(value: Any) -> Hashable:
    if type(value) is tuple:
        inner = tuple(map(_number_types, value))
        return inner if any(each is not None for each in inner) else None
    return type(value) if type(value) in _NUMBERS or isinstance(value, np.generic) else None


def has_attributes(value: Any) -> bool:
    has_some = hasattr(value, "__dict__") or any(map(_slots, type(value).__mro__))
    # A dataclass with slots but without fields counts too.
    return has_some or dataclasses.is_dataclass(value)


def attributes_of(value: Any) -> Iterator[tuple[str, Any]]:
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


# --- Generated code that checks whether a value has the key of a static value ---
#
# Functions named `_require_...` write one condition: the guard misses if the condition is false.
#
# A guard is the code that checks if the value in an argument may replace the static value of a
# trace. For most types, the guard compares the two values directly. For all other types, the guard
# computes the key of the argument's value again.
#
# The compiled function holds the static value of the trace. If this value may change in place, and
# the argument has another, equal object, the guard checks both objects.


_COMPARED = (int, str, bytes)

_MAX_UNPACKED = 31
"""A longer tuple is not compared element by element: its key is computed again."""


def write_static_guard(writer: Any, name: str, value: Any, *, of_node: bool) -> None:
    """Writes the guard that checks if the variable `name` may replace `value` in a trace.

    **Arguments:**

    - `of_node`: `True` if `value` is in the static part of a node, `False` if it is a static leaf.
      An unhashable static leaf is compared by identity. An unhashable static part of a node is
      compared by value. This guard does not check if the containers in `value` are unchanged; the
      guard of the node does this.
    """
    cls = type(value)
    if value is None or value is True or value is False:
        writer.miss_if(f"{name} is not {value!r}")
    elif cls in _COMPARED:
        _require_type(writer, name, cls)
        writer.miss_if(f"{name} != {writer.constant(value)}")
    elif cls is float:
        _require_type(writer, name, float)
        _require_float(writer, name, value)
    elif cls is tuple and len(value) <= _MAX_UNPACKED and _has_key(value, of_node):
        _require_type(writer, name, tuple)
        for part, each in zip(writer.unpack(name, len(value)), value, strict=True):
            write_static_guard(writer, part, each, of_node=of_node)
    elif is_by_identity(value) or not _has_key(value, of_node):
        writer.miss_if(f"{name} is not {writer.constant(value)}")
    elif cls is types.MethodType:
        # Each access to a method makes a new object, so methods are compared by their parts.
        _require_type(writer, name, types.MethodType)
        write_static_guard(writer, writer.assign(f"{name}.__func__"), value.__func__, of_node=False)
        write_static_guard(writer, writer.assign(f"{name}.__self__"), value.__self__, of_node=False)
    elif StaticKey(value, of_node=of_node).is_immutable:
        differs = f"{writer.constant(_key)}({name}) != {writer.constant(_key(value))}"
        writer.miss_if(f"{name} is not {writer.constant(value)} and {differs}")
    else:
        _require_unchanged(writer, name, value)


def _require_type(writer: Any, name: str, cls: type) -> None:
    writer.miss_if(f"type({name}) is not {writer.constant(cls)}")


def _require_float(writer: Any, name: str, value: float) -> None:
    if math.isnan(value):
        writer.miss_if(f"{name} == {name}")
    else:
        writer.miss_if(f"{name} != {writer.constant(value)}")
    if math.isnan(value) or value == 0.0:
        sign = writer.constant(math.copysign(1.0, value))
        writer.miss_if(f"{writer.constant(math.copysign)}(1.0, {name}) != {sign}")


def _require_unchanged(writer: Any, name: str, value: Any) -> None:
    """Writes the guard of a `value` that may change in place.

    The object in the variable `name` must have the key that `value` had at the trace. If this
    object is not `value`, `value` must still have this key too, because the compiled function holds
    `value`.
    """
    same = writer.constant(value)
    _require_type(writer, name, type(value))
    fields = fields_compared(value)
    if type(value) is functools.partial and _stays_but_for_keywords(value):
        with writer.block(f"if {name} is not {same}:"):
            _require_key(writer, name, value)
            _require_key(writer, same, value)
        _require_keywords(writer, name, value)
    elif not is_hashable(value) and StaticKey(value, of_node=True).is_fixed:
        with writer.block(f"if {name} is not {same}:"):
            _require_key(writer, name, value)
    elif is_hashable(value) and fields is not None and all(hasattr(value, each) for each in fields):
        _require_fields(writer, name, value, fields)
        with writer.block(f"if {name} is not {same}:"):
            _require_fields(writer, same, value, fields)
    elif is_hashable(value) and is_by_own_equality(value):
        _require_hash(writer, name, value)
        with writer.block(f"if {name} is not {same}:"):
            writer.miss_if(f"not ({name} == {same})")
            _require_hash(writer, same, value)
    else:
        _require_key(writer, name, value)
        with writer.block(f"if {name} is not {same}:"):
            _require_key(writer, same, value)


def _require_key(writer: Any, name: str, value: Any) -> None:
    writer.miss_if(f"{writer.constant(_key)}({name}) != {writer.constant(_key(value))}")


def _require_keywords(writer: Any, name: str, value: functools.partial) -> None:
    keywords = writer.assign(f"{name}.keywords")
    writer.miss_if(f"{name}.__dict__ or len({keywords}) != {len(value.keywords)}")
    for key, each in value.keywords.items():
        keyword = writer.assign(f"{keywords}[{key!r}]")
        if is_array(each):
            writer.miss_if(f"{keyword} is not {writer.constant(each)}")
        else:
            write_static_guard(writer, keyword, each, of_node=False)


def _require_fields(writer: Any, name: str, value: Any, fields: list[str]) -> None:
    for field in fields:
        each, part = getattr(value, field), writer.assign(f"{name}.{field}")
        if is_hashable(each):
            write_static_guard(writer, part, each, of_node=False)
        else:
            key = writer.constant(_key_by_elements(each))
            writer.miss_if(f"{writer.constant(_key_by_elements)}({part}) != {key}")


def _require_hash(writer: Any, name: str, value: Any) -> None:
    numbers = f"{writer.constant(types_of_numbers)}({name})"
    writer.miss_if(f"hash({name}) != {hash(value)}")
    writer.miss_if(f"{numbers} != {writer.constant(types_of_numbers(value))}")


def _stays_but_for_keywords(partial: functools.partial) -> bool:
    """Whether all parts of a partial are immutable, so that only its keywords can change."""
    parts = (partial.func, *partial.args, *partial.keywords.values())
    return not vars(partial) and all(
        is_array(part) or (is_hashable(part) and StaticKey(part).is_immutable) for part in parts
    )


def _has_key(value: Any, of_node: bool) -> bool:
    """Whether a `StaticKey` can be made for `value`. If not, `value` is compared by identity."""
    try:
        StaticKey(value, of_node=of_node)
    except Exception:  # A `__hash__` may raise any exception.
        return False
    return True


def _key(value: Any) -> Hashable:
    return StaticKey(value, of_node=True).key


def _key_by_elements(value: Any) -> Hashable:
    return StaticKey(value, by_elements=True).key
