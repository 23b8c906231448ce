"""A frozen object with a slot in which its partition is kept, once it was made.

The slot lies outside `__dict__`, so that `vars`, `copy`, `pickle` and the dataclass functions do
not see it. It holds one of: nothing; `INITIALISING`, while `__init__` runs and fields may be
assigned; the pair `(dynamic, structure)` of `eqxlike._partition`, replaced as a whole so that
a thread sees the old pair or the new.
"""

import dataclasses
from typing import Any


class KeepsPartition:
    """Base of `Module`: the slot, and the rule that fields are assigned in `__init__` only."""

    __slots__ = ("__dict__", "__weakref__", "_eqxlike_kept")

    def __setattr__(self, name: str, value: Any) -> None:
        if get_kept(self) is INITIALISING and name in type(self).__dataclass_fields__:  # pyright: ignore[reportAttributeAccessIssue]
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


# A slot's descriptor, unlike `setattr`, is not stopped by a frozen class; `__dict__` cannot reach
# a slot at all.
_slot: Any = KeepsPartition.__dict__["_eqxlike_kept"]
set_kept = _slot.__set__
drop_kept = _slot.__delete__


class _Initialising:
    __slots__ = ()

    def __repr__(self) -> str:
        return "INITIALISING"


INITIALISING = _Initialising()


def get_kept(module: KeepsPartition) -> Any:
    """What the slot holds, or `None`. Not by `getattr`: a user's `__getattr__` must not see it."""
    try:
        return _slot.__get__(module)
    except AttributeError:
        return None
