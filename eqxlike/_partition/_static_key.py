"""Keys for static values: two values share a trace only if no program could tell them apart.

Python's `==` is not enough: `1 == 1.0 == True` and `0.0 == -0.0`, with equal hashes, and `nan` does
not equal itself. Nor is identity: an object that hashes by identity may be changed in place.
"""

import dataclasses
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
    types.BuiltinFunctionType,
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
    - `held`: objects that the key names by their `id`. Whoever keeps the key keeps these alive
        too, but not the other way round: a table of keys alone holds none of them.

    **Raises:** `TypeError` if the value is not hashable.
    """

    __slots__ = ("held", "is_immutable", "key")

    def __init__(self, value: Any):
        self.held: list[Any] = []
        self.is_immutable = True
        self.key = self._of(value)

    def _of(self, value: Any) -> Hashable:
        kind = type(value)
        if kind in _BY_VALUE:
            return kind, value
        if kind is float:
            return kind, value.hex()
        if kind is complex:
            return kind, value.real.hex(), value.imag.hex()
        if isinstance(value, _BY_IDENTITY):
            return self._identity(value)
        if isinstance(value, tuple):
            return kind, tuple(map(self._of, value))
        if kind is frozenset:
            return kind, frozenset(map(self._of, value))
        if kind in _PARTS:
            # Not all of these are hashable, but JAX only ever sees the key.
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
        names = [name for base in type(value).__mro__ for name in _slots(base)]
        if not names and not hasattr(value, "__dict__"):
            return self._identity(value)
        self.is_immutable = False
        state = dict(getattr(value, "__dict__", {}))
        state.update((name, getattr(value, name)) for name in names if hasattr(value, name))
        attributes = tuple((name, self._of_attribute(each)) for name, each in state.items())
        return self._identity(value), attributes

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
        if kind.__hash__ is not None:
            return self._of(value)
        self.is_immutable = False
        if isinstance(value, np.ndarray):
            return kind, value.shape, value.dtype, value.tobytes()
        if kind is list:
            return kind, tuple(map(self._of_contents, value))
        if kind is dict:
            return kind, tuple(map(self._of_contents, value.items()))
        if kind is set:
            return kind, frozenset(map(self._of, value))
        return self._of_state(value)


_PARTS: dict[type, Callable[[Any], Iterable[Any]]] = {
    functools.partial: lambda partial: (partial.func, partial.args, *partial.keywords.items()),
    types.MethodType: lambda method: (method.__func__, method.__self__),
    slice: lambda s: (s.start, s.stop, s.step),
    range: lambda r: (r.start, r.stop, r.step),
}


def _compares_by_fields(kind: type) -> bool:
    """Whether `kind` is a frozen dataclass with generated equality, so that `C(1) == C(1.0)`."""
    parameters = kind.__dict__.get("__dataclass_params__")
    return parameters is not None and parameters.frozen and parameters.eq


def _slots(base: type) -> list[str]:
    slots = base.__dict__.get("__slots__", ())
    slots = (slots,) if isinstance(slots, str) else slots
    return [name for name in slots if name not in ("__dict__", "__weakref__")]
