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
import sys
import threading
from typing import TYPE_CHECKING, Any


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


def get_cached(module: "CachesPartition") -> Any:
    """The value in the slot, or `None` if it is empty."""
    try:
        return _slot.__get__(module)
    except AttributeError:
        return None


_reading = threading.Lock()


def read_fields(module: "CachesPartition") -> dict[str, Any]:
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


class Field:
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
        return Field, (self.name, *([self.default] if has_default else []))

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


def can_stay_lazy(cls: type) -> bool:
    """Whether reading any field of a lazy instance of `cls` reaches its `Field`.

    It does not if a base class has a method or a property of the same name, or if instances carry
    metadata, which is stored with the fields.
    """
    if carries_metadata(cls):
        return False
    names = [field.name for field in dataclasses.fields(cls)]  # pyright: ignore[reportArgumentType]
    found = [next(vars(base)[n] for base in cls.__mro__ if n in vars(base)) for n in names]
    return bool(names) and all(type(each) is Field for each in found)


class CachesPartition(_Storage):
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


def is_field(cls: Any, name: str) -> bool:
    """Whether `name` is a field of the dataclass `cls`, not a `ClassVar` nor an `InitVar`."""
    field = cls.__dataclass_fields__.get(name)
    return field is not None and field._field_type is dataclasses._FIELD  # pyright: ignore


def _explain_frozen(module: CachesPartition, name: str) -> str:
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


# The metadata of callables (name, docstring and the like), and of Modules that wrap them.


METADATA = frozenset({"__name__", "__qualname__", "__doc__", "__module__", "__annotations__"})


_ANNOTATIONS = "__annotations__"


_OWN = "_eqxlike_metadata"
"""The key in the `__dict__` of an instance for its own metadata, if any."""


@dataclasses.dataclass(frozen=True)
class Metadata:
    """The metadata that `module_update_wrapper` gave to an instance.

    It is part of the structure of the tree, so it must be hashable: the annotations are pairs, and
    a value that is not hashable is compared by identity.
    """

    named: tuple[tuple[str, Any], ...]
    annotations: tuple[tuple[str, Any], ...] | None


class _Itself:
    """A hashable wrapper of a value that is not; two are equal if they hold the same object."""

    __slots__ = ("value",)

    def __init__(self, value: Any):
        self.value = value

    def __eq__(self, other: object) -> bool:
        return type(other) is _Itself and other.value is self.value

    def __hash__(self) -> int:
        return id(self.value)


def _hashable(value: Any) -> Any:
    try:
        hash(value)
    except TypeError:
        return _Itself(value)
    return value


def _plain(value: Any) -> Any:
    return value.value if type(value) is _Itself else value


def has_metadata(fields: dict[str, Any]) -> bool:
    """Whether the instance with these `fields`, its `__dict__`, has its own metadata."""
    return _OWN in fields


def shown_by(described: Any) -> dict[str, Any]:
    """The metadata of a callable, by name."""
    return {name: getattr(described, name) for name in METADATA if hasattr(described, name)}


def make_metadata(shown: dict[str, Any]) -> Metadata:
    """The metadata `shown`, in a form that can be part of a structure."""
    annotations = shown.get(_ANNOTATIONS)
    if annotations is not None:
        annotations = tuple((name, _hashable(value)) for name, value in annotations.items())
    names = sorted(shown.keys() - {_ANNOTATIONS})
    return Metadata(tuple((name, _hashable(shown[name])) for name in names), annotations)


def read_metadata(fields: dict[str, Any]) -> Metadata | None:
    return fields.get(_OWN)


def write_metadata(metadata: Metadata | None, fields: dict[str, Any]) -> None:
    if metadata is not None:
        fields[_OWN] = metadata
        fields.update((name, _plain(value)) for name, value in metadata.named)
        if metadata.annotations is not None:
            fields[_ANNOTATIONS] = {name: _plain(value) for name, value in metadata.annotations}


def carries_metadata(cls: Any) -> bool:
    """Whether instances of `cls` may have their own metadata, which a map preserves."""
    return isinstance(getattr(cls, "__wrapped__", None), property)


def is_found_by_name(described: Any) -> bool:
    """Whether the module of `described` has it under its qualified name.

    This excludes `__main__`, which is another module in another process.
    """
    module = getattr(described, "__module__", None)
    found = None if module == "__main__" else sys.modules.get(module or "")
    for name in getattr(described, "__qualname__", "").split("."):
        found = getattr(found, name, None)
    return found is described
