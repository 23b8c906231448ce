"""The storage of Modules: frozen fields, and a slot that caches the partition.

The slot is outside of `__dict__`, so that `vars`, `copy`, `pickle` and the dataclass functions do
not see it. The slot has one of three states:

- It is empty.
- It holds `INITIALISING` while `__init__` runs and may assign fields. `ModuleMeta.__call__` writes
  `INITIALISING` before `__init__` runs, and clears the slot afterwards.
- It holds a `CachedPartition`. To change the partition, a new object is put into the slot, so that
  another thread sees either the old or the new partition.

Three functions of `_partition` write a partition:

- `flatten` (`_cache` in `_flatten.py`), for the Modules that it has walked through;
- `ModuleNode.cache`, which a fast path calls for a Module whose slot is empty;
- the function that `RebuildWriter` writes, for the Modules that a filtered function returns.

A Module that a filtered function returns may be *lazy*: it has its partition, but no fields yet.
The first read of a field builds all fields from the partition and stores them. A training loop
reads no fields: it passes the partition to the next call, and so avoids building some hundred
objects. A Module is lazy if and only if its slot holds a `LazyPartition`. An empty `__dict__` would
be no proof, since `object.__setattr__` can write to the `__dict__` of a lazy Module.
"""

import dataclasses
import threading
from typing import TYPE_CHECKING, Any

from ._field import is_field


class CachedPartition:
    """The arrays of a Module, in tree order, and the Structure of everything else.

    Usually `structure` is the interned Structure. But the Module may have its own static
    containers, which are equal to the containers in the interned Structure. Then `structure` is an
    `_OfOwnContainers` (`_partition/_flatten.py`).
    """

    __slots__ = ("arrays", "structure")

    def __init__(self, arrays: tuple[Any, ...], structure: Any):
        self.arrays = arrays
        self.structure = structure


class LazyPartition(CachedPartition):
    """The partition of a Module whose fields have not been built yet."""

    __slots__ = ()


class _Storage:
    __slots__ = ("__dict__", "__weakref__", "_eqxlike_cached")


# These functions read and write the slots directly. They bypass the `__setattr__` of a frozen
# Module and a `__getattr__` that a user defines.
_slot: Any = _Storage.__dict__["_eqxlike_cached"]
set_cached = _slot.__set__
clear_slot = _slot.__delete__
stored_fields = _Storage.__dict__["__dict__"].__get__
"""Returns the stored `__dict__` of a Module, which is empty if the Module is lazy."""


class _Initialising:
    __slots__ = ()

    def __repr__(self) -> str:
        return "INITIALISING"

    def __reduce__(self) -> str:
        return "INITIALISING"


INITIALISING = _Initialising()


def get_cached(module: "FrozenStorage") -> Any:
    """The value in the slot `_eqxlike_cached`, or `None` if the slot is empty."""
    try:
        return _slot.__get__(module)
    except AttributeError:
        return None


_reading = threading.Lock()


def read_fields(module: "FrozenStorage") -> dict[str, Any]:
    """Returns the `__dict__` of a Module. If the Module is lazy, its fields are built first."""
    fields = stored_fields(module)
    cached = get_cached(module)
    if type(cached) is LazyPartition:
        built = cached.structure.fields(cached.arrays)
        with _reading:
            # If two threads build the fields at once, both return the fields of the first thread.
            if get_cached(module) is cached:
                for name, value in built.items():
                    fields.setdefault(name, value)
                set_cached(module, CachedPartition(cached.arrays, cached.structure))
    return fields


class LazyAttribute:
    """Descriptor for a field of a Module class. It builds the fields of a lazy instance.

    It is not a data descriptor, so Python calls it only if the `__dict__` of the instance lacks the
    field. The field is missing if the instance is lazy, or while its `__init__` runs. On the class,
    the descriptor returns the default of the field, as in any dataclass.
    """

    __slots__ = ("default", "name")

    def __init__(self, name: str, default: Any = dataclasses.MISSING):
        self.name = name
        self.default = default

    def __reduce__(self) -> tuple[Any, ...]:
        # `MISSING` is not pickled, since unpickling would make another object.
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
    """Base class of `Module`. It has the slot, and allows only `__init__` to assign fields."""

    __slots__ = ()

    @property
    def __dict__(self) -> dict[str, Any]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return read_fields(self)

    # The methods are hidden from type checkers, which would otherwise allow assigning to any name.
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
        # `copy` and `pickle` get the fields, but not the cached partition.
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
