"""Where the entries of one function are kept: with it, or with a closure that was its argument."""

import collections
import weakref
from collections.abc import Hashable
from types import FunctionType
from typing import Any

from ..._partition import Structure
from ._attached import attached
from ._compiled import Entry

_MAX_ENTRIES = 4096
"""Entries kept in one place; the oldest go first."""

_NAME = "__eqxlike_entries__"

_Table = collections.OrderedDict[Hashable, Entry]


class Entries:
    """The entries of one function, by key.

    A key holds the static leaves of the arguments. If one of them is a short-lived function, the
    entry is kept in its `__dict__`, so that the two go together: kept here, it would hold the
    function until thousands of others had come.
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

    def get(self, key: Hashable, structures: tuple[Structure, ...]) -> Entry | None:
        return self._table(structures).get(key)

    def setdefault(self, key: Hashable, entry: Entry) -> Entry:
        table = self._table(entry.structures)
        entry = table.setdefault(key, entry)
        if len(table) > _MAX_ENTRIES:
            table.popitem(last=False)
        return entry

    def remove(self, entry: Entry) -> None:
        table = self._table(entry.structures)
        for key in [key for key, each in table.items() if each is entry]:
            del table[key]

    def clear(self) -> None:
        self._lasting.clear()
        for anchor in list(self._anchors):
            attached(anchor, _NAME, weakref.WeakKeyDictionary).pop(self, None)


def anchor_of(structures: tuple[Structure, ...]) -> Any:
    """The short-lived function that an entry for these Structures goes with, or `None`."""
    return next((each.anchor for each in structures if each.anchor is not None), None)
