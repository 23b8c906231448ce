"""Dispatchers, one for each function and its options, which find the compiled function to call."""

import collections
import itertools
import threading
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator
from types import FunctionType
from typing import Any

import jax
import jax.tree_util as jtu

from ..._checking import is_checking, when_switched_on
from ..._compat import Tracer
from ..._departures import Departure, departures
from ..._partition import Structure, concrete_array_types, flatten
from ..._pytree import listed
from ..._transfers import TransferError, exclusive_device, is_any_exclusive, when_exclusive
from ._arguments import ArgumentOrder
from ._compiled import CompiledFunction
from ._donation import Donate, check_donate
from ._fast_path import MISS, FastPath, always_miss
from ._in_shardings import check_in_shardings
from ._traces import History

_MAX_RECENT = 16
"""At most this many fast paths are tried before the long way. They serve functions that are called
with different static values in turn.
"""


class Dispatcher:
    """Finds, for each call of one function, the compiled function and the fast path to it.

    **Arguments:**

    - `function`: the function to compile; held weakly where that is possible, as the caller holds
      it.
    - `described`: the function that the arguments below describe; it may be replaced later, if
      `function` only calls what is bound to it.
    - `num_bound`: the number of arguments at the front that are bound to what the user wrapped: the
      Module that is called, the instance of a bound method.
    - `bound_names`: the names of the arguments that are bound by name, as in a partial function.
    - `order`: the order of its arguments.
    - `donate`: see `check_donate`.
    - `jit_options`: further keyword arguments of `jax.jit`.
    - `history`: the traces of the function, none so far.
    - `full_name`: what a user calls the function, with its module.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        described: Callable[..., Any],
        num_bound: int,
        bound_names: tuple[str, ...],
        order: ArgumentOrder,
        donate: Donate | Iterable[str],
        jit_options: dict[str, Any],
        history: History,
        full_name: str,
    ):
        self.get_function = _reference(function)
        self.get_described = _reference(described)
        self.num_bound = num_bound
        self.bound_names = bound_names
        self.order = order
        self.donate = check_donate(donate, self.order)
        check_in_shardings(jit_options.get("in_shardings"), self.order)
        self.jit_options = jit_options
        self.history = history
        self.full_name = full_name
        self.lock = threading.RLock()
        self.cache = Cache()
        # The fast path that was taken last, for calls that pass nothing by name; and the last few,
        # with the names that they are for.
        self.fast_path: FastPath = always_miss
        self.recent: tuple[tuple[tuple[str, ...], FastPath], ...] = ()
        _dispatchers.add(self)

    def call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The output of a call, the long way: the fast path, if any, was not made for it."""
        ordered, names = self.order.arrange(args, kwargs)
        for recent_names, fast_path in self.recent:
            if recent_names == names:
                output = fast_path(ordered)
                if output is not MISS:
                    if fast_path is not self.recent[0][1]:
                        self._remember(fast_path, names)
                    return output
        arrays, compiled = self.find(ordered, names)
        compiled.watched.warn_of_changes()
        is_looked_at = is_checking() or is_any_exclusive()
        if is_looked_at:
            refuse_leaving(self.order, ordered, names, arrays, compiled)
        output = compiled.call(arrays)
        if all(type(array) in concrete_array_types for array in arrays) and not is_looked_at:
            fast_path = compiled.fast_path(arrays)
            if fast_path is not None:
                self._remember(fast_path, names)
                if is_checking() or is_any_exclusive():
                    # Since this call began: who asked then had fast paths forgotten before.
                    self.forget_fast_paths()
        return output

    def find(
        self, ordered: tuple[Any, ...], names: tuple[str, ...], *, with_abstract: bool = False
    ) -> tuple[list[Any], CompiledFunction]:
        """The arrays of an ordered call, and the compiled function for it, new or old."""
        arrays: list[Any] = []
        structures: list[Structure] = []
        for index, arg in enumerate(ordered):
            arg_arrays, structure = flatten(
                arg,
                with_abstract=with_abstract,
                is_bound=index < self.num_bound,
                root=lambda index=index: self.order.labels(len(ordered), names)[index],
            )
            arrays += arg_arrays
            structures.append(structure)
        key = (names, *structures)
        compiled = self.cache.get(key, tuple(structures))
        if compiled is not None and not compiled.is_current():
            self.drop(compiled)
            compiled = None
        if compiled is None:
            made = CompiledFunction(self, tuple(structures), names, ordered)
            with self.lock:
                compiled = self.cache.setdefault(key, made)
        return arrays, compiled

    def _remember(self, fast_path: FastPath, names: tuple[str, ...]) -> None:
        others = (each for each in self.recent if each[1] is not fast_path)
        self.recent = ((names, fast_path), *itertools.islice(others, _MAX_RECENT - 1))
        if not names:
            self.fast_path = fast_path

    def forget_fast_paths(self) -> None:
        self.recent = ()
        self.fast_path = always_miss

    def drop(self, compiled: CompiledFunction) -> None:
        with self.lock:
            self.cache.remove(compiled)
        self.forget_fast_paths()

    def clear(self) -> None:
        with self.lock:
            self.cache.clear()
            self.history = self.history.emptied()
        self.forget_fast_paths()


def _reference(function: Callable[..., Any]) -> Callable[[], Any]:
    try:
        return weakref.ref(function)
    except TypeError:
        return lambda: function


_dispatchers: weakref.WeakSet[Dispatcher] = weakref.WeakSet()


def clear_dispatchers() -> None:
    for dispatcher in list(_dispatchers):
        dispatcher.clear()


def _forget_all_fast_paths() -> None:
    for dispatcher in list(_dispatchers):
        dispatcher.forget_fast_paths()


when_switched_on(_forget_all_fast_paths)
when_exclusive(_forget_all_fast_paths)


# --- The cache of the compiled functions of one function ---


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


# --- Calls that `transfers("exclusive")` looks at: what would leave the device is not run ---


# A loop calls the same program again and again.
_found: weakref.WeakKeyDictionary[Any, dict[Any, tuple[Departure, ...]]] = (
    weakref.WeakKeyDictionary()
)


def refuse_leaving(
    order: ArgumentOrder,
    ordered: tuple[Any, ...],
    names: tuple[str, ...],
    arrays: list[Any],
    compiled: CompiledFunction,
) -> None:
    """Raises `TransferError` if this call would leave the device of an exclusive context."""
    device = exclusive_device()
    if device is None:
        return
    within = f"inside transfers('exclusive'), which is for {device}"
    elsewhere = [
        f"{label}{jtu.keystr(path)} on {', '.join(map(str, leaf.devices()))}"
        for label, arg in zip(order.labels(len(ordered), names), ordered, strict=True)
        for path, leaf in jtu.tree_leaves_with_path(arg)
        if _is_concrete(leaf) and leaf.devices() != {device}
    ]
    if elsewhere:
        raise TransferError(
            f"{order.function_name} got {listed(elsewhere)} {within}: move it there with "
            "`jax.device_put` first."
        )
    try:
        jaxpr = compiled.jitted(arrays).trace(*arrays).jaxpr
    finally:
        compiled.donation_warnings.restore()
    known = _found.setdefault(jaxpr, {})
    if device not in known:
        known[device] = tuple(departures(jaxpr, device))
    if known[device]:
        raise TransferError(
            f"{order.function_name} would leave the device {within}: it calls "
            f"{listed(list(map(str, known[device])))}. Take that out of the program, or call "
            f"{order.function_name} outside of the context."
        )


def _is_concrete(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array) and not isinstance(leaf, Tracer)


# --- Tables that live as long as a function, and may hold it: they are in its `__dict__` ---


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
