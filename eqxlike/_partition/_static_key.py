"""Keys for static values: two values share a trace only if no program could tell them apart.

Python's `==` is not enough: `1 == 1.0 == True` and `0.0 == -0.0`, with equal hashes, and `nan` does
not equal itself. Nor is identity: an object that hashes by identity may be changed in place.
"""

import array
import collections
import dataclasses
import datetime
import decimal
import enum
import functools
import types
from collections.abc import Callable, Hashable, Iterable
from typing import Any

import jax
import numpy as np

from .._compat import PjitFunction
from .._module import Module

# Compared by type and value: immutable, and equal values of one type are interchangeable.
_BY_VALUE = frozenset(
    {bool, int, str, bytes, type(None), type(Ellipsis), type(NotImplemented), np.dtype}
)
# Compared by identity and taken to be immutable, as `jax.jit` takes them: what a function closes
# over is part of the function.
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
_TRUSTED_PACKAGES = ("jax", "jaxlib", "numpy", "ml_dtypes")

ATOMS = _BY_VALUE | {float, complex, types.FunctionType, types.BuiltinFunctionType, PjitFunction}
"""Types of which every instance is a leaf of any pytree (or `None`), and immutable."""


class StaticKey:
    """Makes the key of one static value.

    - `key`: hashable; values with equal keys are interchangeable in a trace at this moment.
    - `is_immutable`: whether that will stay so; if not, the key must be made anew each time.
    - `holds_mutable`: whether a list, dict or the like is inside; its identity is in the key then.
    - `held`: objects that the key names by their `id`. Whoever keeps the key keeps these alive
        too, but not the other way round: a table of keys alone holds none of them.

    With `by_contents` the value need not be hashable: it is then the object, and what it holds now.

    **Raises:** `TypeError` if the value is not hashable and is to be.
    """

    __slots__ = ("_inside", "held", "holds_mutable", "is_immutable", "key")

    def __init__(self, value: Any, *, by_contents: bool = False):
        self.held: list[Any] = []
        self.is_immutable = True
        self.holds_mutable = False
        self._inside: set[int] = set()
        self.key = self._of_contents(value) if by_contents else self._of(value)

    def _of(self, value: Any) -> Hashable:
        kind = type(value)
        if kind in _BY_VALUE:
            return kind, value
        if isinstance(value, _BY_IDENTITY):
            return self._identity(value)
        if isinstance(value, tuple):
            return kind, tuple(map(self._of, value)), self._of_attributes(value)
        if isinstance(value, frozenset):
            return kind, frozenset(map(self._of, value)), self._of_attributes(value)
        for base, told_apart_by in _TOLD_APART_BY.items():
            if isinstance(value, base):
                return kind, told_apart_by(value), self._of_attributes(value)
        if kind in _PARTS:
            # Not all parts are hashable, but JAX only ever sees the key. The dict of keywords of
            # a partial may be written to.
            self.is_immutable = self.is_immutable and kind is not functools.partial
            return kind, tuple(map(self._of_contents, _PARTS[kind](value)))
        if isinstance(value, Module) or _compares_by_fields(kind):
            names = [field.name for field in dataclasses.fields(value) if field.compare]
            return kind, tuple(self._of(getattr(value, name, None)) for name in names)
        is_trusted = kind.__module__.partition(".")[0] in _TRUSTED_PACKAGES
        if kind.__hash__ is not object.__hash__:
            hash(value)  # Raises if it cannot be.
            self.is_immutable = self.is_immutable and is_trusted
            return kind, value
        return self._identity(value) if is_trusted else self._of_state(value)

    def _identity(self, value: Any) -> Hashable:
        self.held.append(value)
        return "is", id(value)

    def _of_state(self, value: Any) -> Hashable:
        """For what hashes by identity: the object, and what its attributes are now."""
        return self._identity(value), self._of_attributes(value)

    def _of_attributes(self, value: Any) -> Hashable:
        if type(value) in _WITHOUT_ATTRIBUTES or id(value) in self._inside:
            return None
        slots = [slot for base in type(value).__mro__ for slot in _slots(base)]
        if not slots and not hasattr(value, "__dict__"):
            return None
        self.is_immutable = False
        self._inside.add(id(value))
        state = dict(getattr(value, "__dict__", {}))
        state.update((slot, getattr(value, slot)) for slot in slots if hasattr(value, slot))
        key = tuple((name, self._of_attribute(each)) for name, each in state.items())
        self._inside.discard(id(value))
        return key

    def _of_attribute(self, value: Any) -> Hashable:
        """Containers are looked into; further objects that hash by identity are not."""
        if type(value).__hash__ is object.__hash__ and not isinstance(value, jax.Array):
            return self._identity(value)
        return self._of_contents(value)

    def _of_contents(self, value: Any) -> Hashable:
        """For what a static value holds, which need not be hashable itself."""
        kind = type(value)
        if isinstance(value, jax.Array):
            return self._identity(value)
        if kind is tuple:
            return kind, tuple(map(self._of_contents, value))
        if _is_hashable(value):
            return self._of(value)
        self.is_immutable = False
        self.holds_mutable = True
        base = next((base for base in _ELEMENTS if isinstance(value, base)), None)
        if base is None:
            return self._of_state(value)
        # The container too: another may have the same elements now, and others later.
        identity = self._identity(value)
        if id(value) in self._inside:
            return identity
        self._inside.add(id(value))
        key = identity, tuple(map(self._of_contents, _ELEMENTS[base](value)))
        self._inside.discard(id(value))
        return *key, self._of_attributes(value)


_ELEMENTS: dict[type, Callable[[Any], Iterable[Any]]] = {
    np.ndarray: lambda a: (a.shape, a.dtype, a.tobytes()),
    list: iter,
    dict: lambda d: d.items(),
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
    datetime.datetime: lambda time: (time.isoformat(), time.fold, str(time.tzinfo)),
    datetime.time: lambda time: (time.isoformat(), time.fold, str(time.tzinfo)),
}


def _is_hashable(value: Any) -> bool:
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
    functools.partial: lambda partial: (partial.func, partial.args, *partial.keywords.items()),
    types.MethodType: lambda method: (method.__func__, method.__self__),
    types.BuiltinMethodType: lambda method: (method.__name__, method.__self__),
    slice: lambda s: (s.start, s.stop, s.step),
    range: lambda r: (r.start, r.stop, r.step),
}

_WITHOUT_ATTRIBUTES = frozenset(
    {tuple, frozenset, float, complex, list, dict, set, bytearray, np.ndarray}
    | {collections.deque, array.array, decimal.Decimal, datetime.datetime, datetime.time}
)


def _compares_by_fields(kind: type) -> bool:
    """Whether `kind` is a frozen dataclass, or a subclass of one, whose generated equality it has:
    then `C(1) == C(1.0)`.
    """
    owner = next(base for base in kind.__mro__ if "__eq__" in vars(base))
    parameters = vars(owner).get("__dataclass_params__")
    return parameters is not None and parameters.frozen and parameters.eq


def _slots(base: type) -> list[str]:
    slots = vars(base).get("__slots__", ())
    slots = (slots,) if isinstance(slots, str) else slots
    prefix = f"_{base.__name__.lstrip('_')}"
    return [
        f"{prefix}{slot}" if slot.startswith("__") and not slot.endswith("__") else slot
        for slot in slots
        if slot not in ("__dict__", "__weakref__")
    ]
