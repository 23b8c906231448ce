"""A frozen object with a slot in which its partition is kept, once it was made.

The slot lies outside `__dict__`, so that `vars`, `copy`, `pickle` and the dataclass functions do
not see it. It holds one of: nothing; `INITIALISING`, while `__init__` runs and fields may be
assigned; the pair `(dynamic, structure)` of `eqxlike._partition`, replaced as a whole so that
a thread sees the old pair or the new.

What a filtered function returns may be *unread*: it has the pair and no fields yet. They are built
from the pair, and stay, when somebody asks for the first of them. A training loop never does: it
hands the pair to the next call, and is spared the building of some hundred objects.
"""

import dataclasses
from typing import Any


class _Storage:
    __slots__ = ("__dict__", "__weakref__", "_eqxlike_kept")


# Slots' descriptors: unlike `setattr` they are not stopped by a frozen class, and a user's
# `__getattr__` does not see them.
_slot: Any = _Storage.__dict__["_eqxlike_kept"]
set_kept = _slot.__set__
drop_kept = _slot.__delete__
stored_fields = _Storage.__dict__["__dict__"].__get__
"""The `__dict__` of a Module as it is, empty if the Module is unread."""


class _Initialising:
    __slots__ = ()

    def __repr__(self) -> str:
        return "INITIALISING"


INITIALISING = _Initialising()


def get_kept(module: "KeepsPartition") -> Any:
    """What the slot holds, or `None`."""
    try:
        return _slot.__get__(module)
    except AttributeError:
        return None


def read_fields(module: "KeepsPartition") -> dict[str, Any]:
    """The `__dict__` of a Module, with its fields in it."""
    fields = stored_fields(module)
    kept = get_kept(module)
    if kept is not None and kept is not INITIALISING:
        dynamic, structure = kept
        if len(fields) < structure.num_fields:
            # Of two threads that come at once the first to set a field wins, for both.
            for name, value in structure.fields(dynamic).items():
                fields.setdefault(name, value)
    return fields


def has_default(cls: Any, name: str) -> bool:
    """Whether `name` is a field of the dataclass `cls` with a default."""
    field = cls.__dataclass_fields__.get(name)
    return field is not None and field.default is not dataclasses.MISSING


def can_stay_unread(cls: type) -> bool:
    """Whether nobody could tell an unread instance of `cls` by reading its attributes.

    Not so where reading an attribute runs a user's code, nor where a class attribute would be
    found in place of a missing field.
    """
    names = cls.__dataclass_fields__  # pyright: ignore[reportAttributeAccessIssue]
    return (
        cls.__getattr__ is KeepsPartition.__getattr__  # pyright: ignore[reportAttributeAccessIssue]
        and cls.__getattribute__ is object.__getattribute__
        and not any(name in base.__dict__ for base in cls.__mro__ for name in names)
        and not any("__dict__" in base.__dict__ for base in cls.__mro__ if base not in _BASES)
    )


class KeepsPartition(_Storage):
    """Base of `Module`: the slot, and the rule that fields are assigned in `__init__` only."""

    __slots__ = ()

    @property
    def __dict__(self) -> dict[str, Any]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return read_fields(self)

    def __getattr__(self, name: str) -> Any:
        # Only asked for what is not found otherwise: the fields of an unread Module, and slips.
        fields = read_fields(self)
        if name in fields:
            return fields[name]
        if has_default(type(self), name):
            # In an `__init__` that has not set it; elsewhere all fields are there.
            return type(self).__dataclass_fields__[name].default  # pyright: ignore
        raise AttributeError(
            f"{type(self).__name__!r} object has no attribute {name!r}", name=name, obj=self
        )

    def __setattr__(self, name: str, value: Any) -> None:
        is_field = name in type(self).__dataclass_fields__  # pyright: ignore[reportAttributeAccessIssue]
        if get_kept(self) is INITIALISING and is_field:
            object.__setattr__(self, name, value)
        else:
            raise dataclasses.FrozenInstanceError(_explain_frozen(self, name))

    def __delattr__(self, name: str) -> None:
        raise dataclasses.FrozenInstanceError(
            f"cannot delete field {name!r} of a {type(self).__name__}: a Module is frozen."
        )

    def __getstate__(self) -> dict[str, Any]:
        # For `copy` and `pickle`: the fields, and nothing that is kept.
        return self.__dict__


_BASES = (_Storage, KeepsPartition)


def _explain_frozen(module: KeepsPartition, name: str) -> str:
    kind = type(module).__name__
    if get_kept(module) is INITIALISING:
        return (
            f"cannot assign to field {name!r}: {kind} declares no such field. Write "
            f"`{name}: <type>` in the body of the class."
        )
    return (
        f"cannot assign to field {name!r} of a {kind}: a Module is frozen once `__init__` is done. "
        f"`eqxlike.tree_at(lambda module: module.{name}, module, value)` makes a changed copy."
    )
