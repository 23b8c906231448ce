"""The compiled functions of one function, and tables that live as long as a function."""

import collections
import weakref
from collections.abc import Callable, Hashable, Iterator, Sequence
from types import FunctionType
from typing import Any, Generic, TypeVar

from ..._partition import Structure

_MAX_CACHED = 4096
"""At most this many compiled functions are in one table; the oldest go first."""

_NAME = "__eqxlike_compiled__"

Compiled = TypeVar("Compiled")
_Table = collections.OrderedDict[Hashable, Compiled]


class Cache(Generic[Compiled]):
    """The compiled functions of one function, by key, and by the Structures of the arguments in it.

    A key holds the static leaves of the arguments. If one of them is a short-lived function, what
    is compiled for it is in its `__dict__`, so that the two go together. In the table here, it
    would hold the short-lived function until thousands of others had come.
    """

    def __init__(self) -> None:
        self._lasting: _Table[Compiled] = collections.OrderedDict()
        self._anchors: weakref.WeakSet[FunctionType] = weakref.WeakSet()

    def _table(self, structures: Sequence[Structure]) -> _Table[Compiled]:
        anchor = next((each.anchor for each in structures if each.anchor is not None), None)
        if anchor is None:
            return self._lasting
        tables = attached(anchor, _NAME, weakref.WeakKeyDictionary)
        self._anchors.add(anchor)
        return tables.setdefault(self, collections.OrderedDict())

    def get(self, key: Hashable, structures: Sequence[Structure]) -> Compiled | None:
        return self._table(structures).get(key)

    def setdefault(
        self, key: Hashable, structures: Sequence[Structure], compiled: Compiled
    ) -> Compiled:
        table = self._table(structures)
        compiled = table.setdefault(key, compiled)
        if len(table) > _MAX_CACHED:
            table.popitem(last=False)
        return compiled

    def remove(self, structures: Sequence[Structure], compiled: Compiled) -> None:
        table = self._table(structures)
        for key in [key for key, each in table.items() if each is compiled]:
            del table[key]

    def __iter__(self) -> Iterator[Compiled]:
        yield from list(self._lasting.values())
        for anchor in list(self._anchors):
            tables = attached(anchor, _NAME, weakref.WeakKeyDictionary)
            yield from list(tables.get(self, {}).values())

    def clear(self) -> None:
        self._lasting.clear()
        for anchor in list(self._anchors):
            attached(anchor, _NAME, weakref.WeakKeyDictionary).pop(self, None)


# --- Tables that may hold the function that they go with: they are in its `__dict__` ---


class _Attachment:
    """A value in the `__dict__` of a function, which knows the function that owns it.

    `functools.wraps` copies the `__dict__`, and so do tools that pickle functions by value. A copy
    in another function does not belong to it, and a pickled one belongs to none.
    """

    __slots__ = ("owner", "value")

    def __init__(self, owner: FunctionType | None = None, value: Any = None):
        self.owner = None if owner is None else weakref.ref(owner)
        self.value = value

    def belongs_to(self, function: FunctionType) -> bool:
        return self.owner is not None and self.owner() is function

    def __reduce__(self) -> tuple[Any, ...]:
        return _Attachment, ()


def attached(function: FunctionType, name: str, make: Callable[[], Any]) -> Any:
    """The value attached to `function` under `name`; `make` makes it the first time.

    A `WeakKeyDictionary` of functions will not do: a value that holds its key would keep both for
    good. A function that is in a cycle with its own `__dict__` is garbage like any other.
    """
    found = vars(function).get(name)
    if found is None or not found.belongs_to(function):
        found = vars(function)[name] = _Attachment(function, make())
    return found.value
