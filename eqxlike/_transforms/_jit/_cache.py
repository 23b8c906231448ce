"""The cache of the compiled functions of one function."""

import collections
import weakref
from collections.abc import Hashable, Iterator
from types import FunctionType
from typing import Any

from ..._partition import Structure
from ._attached import attached
from ._compiled import CompiledFunction

_MAX_CACHED = 4096
"""At most this many compiled functions are in one table; the oldest go first."""

_NAME = "__eqxlike_compiled__"

_Table = collections.OrderedDict[Hashable, CompiledFunction]


class Cache:
    """The compiled functions of one function, by key.

    A key holds the static leaves of the arguments. If one of them is a short-lived function, what
    is compiled for it is in its `__dict__`, so that the two go together. In the table here, it
    would hold the short-lived function until thousands of others had come.
    """

    def __init__(self) -> None:
        self._lasting: _Table = collections.OrderedDict()
        self._anchors: weakref.WeakSet[FunctionType] = weakref.WeakSet()

    def _table(self, structures: tuple[Structure, ...]) -> _Table:
        anchor = anchor_of(structures)
        if anchor is None:
            return self._lasting
        tables = attached(anchor, _NAME, weakref.WeakKeyDictionary)
        self._anchors.add(anchor)
        return tables.setdefault(self, collections.OrderedDict())

    def get(self, key: Hashable, structures: tuple[Structure, ...]) -> CompiledFunction | None:
        return self._table(structures).get(key)

    def setdefault(self, key: Hashable, compiled: CompiledFunction) -> CompiledFunction:
        table = self._table(compiled.structures)
        compiled = table.setdefault(key, compiled)
        if len(table) > _MAX_CACHED:
            table.popitem(last=False)
        return compiled

    def remove(self, compiled: CompiledFunction) -> None:
        table = self._table(compiled.structures)
        for key in [key for key, each in table.items() if each is compiled]:
            del table[key]

    def __iter__(self) -> Iterator[CompiledFunction]:
        yield from list(self._lasting.values())
        for anchor in list(self._anchors):
            tables = attached(anchor, _NAME, weakref.WeakKeyDictionary)
            yield from list(tables.get(self, {}).values())

    def clear(self) -> None:
        self._lasting.clear()
        for anchor in list(self._anchors):
            attached(anchor, _NAME, weakref.WeakKeyDictionary).pop(self, None)


def anchor_of(structures: tuple[Structure, ...]) -> Any:
    """The short-lived function with which what is compiled for these must go, or `None`."""
    return next((each.anchor for each in structures if each.anchor is not None), None)
