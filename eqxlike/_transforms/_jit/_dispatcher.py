"""Dispatchers, one for each function and its options, which find the compiled function to call."""

import itertools
import threading
import weakref
from collections.abc import Callable, Iterable
from typing import Any

from ..._checking import is_checking, when_switched_on
from ..._partition import Structure, concrete_array_types, flatten
from ..._transfers import is_any_exclusive, when_exclusive
from ._arguments import ArgumentOrder
from ._cache import Cache
from ._compiled import CompiledFunction
from ._donation import Donate, check_donate
from ._exclusive import refuse_leaving
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
