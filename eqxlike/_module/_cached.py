"""Frozen objects, each with a slot that caches its partition.

The slot is outside `__dict__`, so that `vars`, `copy`, `pickle` and the dataclass functions do not
see it. It holds one of: nothing; `INITIALISING`, while `__init__` runs and may assign fields; a
`CachedPartition`, replaced as a whole so that a thread sees the old one or the new.

A Module that a filtered function returns may be *lazy*: it has its partition and no fields yet. The
first read of a field builds the fields from the partition, and they stay. A training loop reads
none: it passes the partition to the next call, and saves building some hundred objects. A Module
is lazy if it has a `LazyPartition`, not if its `__dict__` is empty, since `object.__setattr__`
writes into that unchecked.
"""

import dataclasses
import threading
from typing import TYPE_CHECKING, Any

from ._field import is_field


class CachedPartition:
    """The arrays of a Module, in tree order, and the Structure of everything else."""

    __slots__ = ("arrays", "structure")

    def __init__(self, arrays: tuple[Any, ...], structure: Any):
        self.arrays = arrays
        self.structure = structure


class LazyPartition(CachedPartition):
    """The partition of a Module whose fields have not been built yet."""

    __slots__ = ()


class _Storage:
    __slots__ = ("__dict__", "__weakref__", "_eqxlike_cached")


# The descriptors of the slots. Unlike `setattr`, a frozen class does not stop them, and they do not
# call a user's `__getattr__`.
_slot: Any = _Storage.__dict__["_eqxlike_cached"]
set_cached = _slot.__set__
drop_cached = _slot.__delete__
stored_fields = _Storage.__dict__["__dict__"].__get__
"""The `__dict__` of a Module as it is, empty if the Module is lazy."""


class _Initialising:
    __slots__ = ()

    def __repr__(self) -> str:
        return "INITIALISING"

    def __reduce__(self) -> str:
        return "INITIALISING"


INITIALISING = _Initialising()


def get_cached(module: "FrozenStorage") -> Any:
    """The value in the slot, or `None` if it is empty."""
    try:
        return _slot.__get__(module)
    except AttributeError:
        return None


_reading = threading.Lock()


def read_fields(module: "FrozenStorage") -> dict[str, Any]:
    """The `__dict__` of a Module; if the Module is lazy, its fields are built first."""
    fields = stored_fields(module)
    cached = get_cached(module)
    if type(cached) is LazyPartition:
        built = cached.structure.fields(cached.arrays)
        with _reading:
            # If two threads come at once, both get the fields that the first has built.
            if get_cached(module) is cached:
                for name, value in built.items():
                    fields.setdefault(name, value)
                set_cached(module, CachedPartition(cached.arrays, cached.structure))
    return fields


class LazyAttribute:
    """The descriptor that a Module class has under the name of each field.

    It is not a data descriptor, so an instance that has the field never calls it. An instance
    without the field is lazy, or in its `__init__`. On the class it returns the default, as in any
    dataclass.
    """

    __slots__ = ("default", "name")

    def __init__(self, name: str, default: Any = dataclasses.MISSING):
        self.name = name
        self.default = default

    def __reduce__(self) -> tuple[Any, ...]:
        # `MISSING` itself would be another object after unpickling.
        has_default = self.default is not dataclasses.MISSING
        return LazyAttribute, (self.name, *([self.default] if has_default else []))

    def __get__(self, instance: Any, owner: type) -> Any:
        if instance is not None:
            fields = read_fields(instance)
            if self.name in fields:
                return fields[self.name]
        if self.default is not dataclasses.MISSING:
            return self.default
        what = (
            f"type object {owner.__name__!r}" if instance is None else f"{owner.__name__!r} object"
        )
        raise AttributeError(
            f"{what} has no attribute {self.name!r}", name=self.name, obj=instance or owner
        )


class FrozenStorage(_Storage):
    """The base of `Module`: the slot, and the rule that only `__init__` assigns fields."""

    __slots__ = ()

    @property
    def __dict__(self) -> dict[str, Any]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return read_fields(self)

    # A type checker that saw these would let any name be assigned.
    if not TYPE_CHECKING:

        def __setattr__(self, name: str, value: Any) -> None:
            if get_cached(self) is INITIALISING and is_field(type(self), name):
                object.__setattr__(self, name, value)
            else:
                raise dataclasses.FrozenInstanceError(_explain_frozen(self, name))

        def __delattr__(self, name: str) -> None:
            raise dataclasses.FrozenInstanceError(
                f"cannot delete field {name!r} of a {type(self).__name__}: a Module is frozen."
            )

    def __getstate__(self) -> dict[str, Any]:
        # `copy` and `pickle` take the fields, and nothing cached.
        return self.__dict__


def _explain_frozen(module: FrozenStorage, name: str) -> str:
    type_name = type(module).__name__
    if get_cached(module) is INITIALISING:
        return (
            f"cannot assign to field {name!r}: {type_name} declares no such field. Write "
            f"`{name}: <type>` in the body of the class."
        )
    return (
        f"cannot assign to field {name!r} of a {type_name}: a Module is frozen once `__init__` is "
        f"done. `eqxlike.tree_at(lambda module: module.{name}, module, value)` makes a changed "
        "copy."
    )
