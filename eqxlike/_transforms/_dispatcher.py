"""From a call to the compiled function for it: one dispatcher for each function and its options."""

import collections
import threading
import warnings
import weakref
from collections.abc import Callable, Hashable, Iterable
from typing import Any

import jax
import jax.tree_util as jtu

from .._checking import is_checking, when_switched_on
from .._partition import ARRAY, Structure, concrete_array_types, flatten
from ._donation import Donate, check_donate, donated_places, is_silent
from ._fast_path import MISS, FastPath, always_miss, make_fast_path
from ._placement import shardings_of_arrays
from ._spelling import Spelling

_MAX_ENTRIES = 4096
"""Entries kept for one function; the oldest go first."""

_MAX_RECENT = 4
"""Fast paths tried before the long way: for functions called in turn with different statics."""

_tracing = threading.local()


class _Outcome:
    """What a traced function returns to JAX if its static part is not that of its first trace.

    JAX's fast path asks that unflattening gives back plain arrays in a node that it can flatten
    again, so this holds arrays, and the tree is built outside.
    """

    __slots__ = ("arrays", "structure")

    def __init__(self, structure: Structure, arrays: tuple[Any, ...]):
        self.structure = structure
        self.arrays = arrays


jtu.register_pytree_node(_Outcome, lambda outcome: (outcome.arrays, outcome.structure), _Outcome)


class Entry:
    """One compiled function: for one combination of Structures of the arguments."""

    def __init__(
        self,
        dispatcher: "Dispatcher",
        structures: tuple[Structure, ...],
        names: tuple[str, ...],
        spelled: tuple[Any, ...],
        arrays: list[Any],
    ):
        self.dispatcher = weakref.ref(dispatcher)
        self.structures = structures
        self.names = names
        self.trace_lock = threading.RLock()
        self.is_traced = False
        self.first_outcome: Structure | None = None
        self._fast_path: FastPath | None = None
        self.out_shardings: Any = None
        self.flat_out_shardings: Any = None
        self.restore_warnings: list[Callable[[], None]] = []
        self.is_silent = is_silent(dispatcher.donate)
        starts = [0]
        for structure in structures:
            starts.append(starts[-1] + structure.num_arrays)
        self.starts = starts
        donated = donated_places(
            dispatcher.donate, dispatcher.spelling, dispatcher.num_bound, len(structures)
        )
        options = dict(dispatcher.jit_options)
        if options.get("in_shardings") is not None:
            unplaced = [None] * starts[dispatcher.num_bound]
            args = spelled[dispatcher.num_bound :]
            placed = shardings_of_arrays("in_shardings", options["in_shardings"], args)
            options["in_shardings"] = (*unplaced, *placed)
        flat = self._make_flat_function(dispatcher)
        if options.get("out_shardings") is not None:
            # A prefix of an outcome that is known only once the function has been traced.
            self.out_shardings = options.pop("out_shardings")
            jax.jit(flat, **options).trace(*arrays)
            options["out_shardings"] = self.flat_out_shardings
        self.jitted = jax.jit(
            flat,
            donate_argnums=[i for at in donated for i in range(starts[at], starts[at + 1])],
            **options,
        )

    def _make_flat_function(self, dispatcher: "Dispatcher") -> Callable[..., Any]:
        """The function that JAX traces: flat arrays in, flat arrays out."""
        get_function = dispatcher.get_function
        num_by_place = len(self.structures) - len(self.names)
        parts = [
            (structure.rebuilder(keep=False), start, stop)
            for structure, start, stop in zip(
                self.structures, self.starts[:-1], self.starts[1:], strict=True
            )
        ]

        def flat(*arrays: Any) -> Any:
            try:
                args = [rebuild(arrays[start:stop]) for rebuild, start, stop in parts]
                kwargs = dict(zip(self.names, args[num_by_place:], strict=True))
                outcome = get_function()(*args[:num_by_place], **kwargs)
                return self._pack(outcome)
            except BaseException:
                # JAX takes its slow path for good where a trace has failed.
                self._drop()
                raise

        flat.__name__ = flat.__qualname__ = dispatcher.spelling.function_name
        return flat

    def _pack(self, outcome: Any) -> Any:
        arrays, structure = flatten(outcome)
        if self.out_shardings is not None:
            shardings = shardings_of_arrays("out_shardings", self.out_shardings, outcome)
            self.flat_out_shardings = shardings[0] if structure is ARRAY else tuple(shardings)
        if self.is_silent:
            self._ignore_unused_donations()
        with self.trace_lock:
            if self.first_outcome is None:
                self.first_outcome = structure
        # A plain tuple, or a bare array, says that the outcome is of the first Structure: JAX
        # builds these without calling Python, about 0.2 us less than a node.
        if structure is not self.first_outcome:
            return _Outcome(structure, tuple(arrays))
        return arrays[0] if structure is ARRAY else tuple(arrays)

    def _ignore_unused_donations(self) -> None:
        """Until the call that is being traced ends: JAX warns when it lowers, after the trace."""
        context = warnings.catch_warnings()
        context.__enter__()
        warnings.filterwarnings("ignore", message="Some donated buffers were not usable")
        self.restore_warnings.append(lambda: context.__exit__(None, None, None))

    def _drop(self) -> None:
        dispatcher = self.dispatcher()
        if dispatcher is not None:
            dispatcher.drop(self)

    def ensure_traced(self, arrays: list[Any]) -> None:
        """Traces once even if several threads come first: JAX by itself would trace in each.

        A thread that is tracing never waits for another, so two cannot wait for each other.
        """
        if self.is_traced or getattr(_tracing, "depth", 0) or jax.config.jax_disable_jit:  # pyright: ignore[reportAttributeAccessIssue]
            return
        with self.trace_lock:
            if self.is_traced:
                return
            _tracing.depth = 1
            try:
                self.jitted.trace(*arrays)
            finally:
                _tracing.depth = 0
            self.is_traced = True

    def fast_path(self, examples: tuple[Any, ...]) -> FastPath:
        """The fast path to this entry, once it was traced."""
        if self._fast_path is None:
            assert self.first_outcome is not None
            self._fast_path = make_fast_path(
                self.structures,
                examples,
                self.jitted,
                self.first_outcome,
                self.finish,
                self.restore_warnings if self.is_silent else None,
            )
        return self._fast_path

    def finish(self, result: Any) -> Any:
        """The outcome of the user's function, from what the jitted function returned."""
        if self.restore_warnings:
            self.restore_warnings.pop()()
        if type(result) is _Outcome:
            structure, arrays = result.structure, result.arrays
        else:
            structure, arrays = self.first_outcome, result
        if structure is ARRAY:
            return result
        assert structure is not None
        is_concrete = all(type(array) in concrete_array_types for array in arrays)
        if not is_concrete:
            # Types of arrays not met before are found out here, by the general walk.
            flatten(arrays)
            is_concrete = all(type(array) in concrete_array_types for array in arrays)
        return structure.rebuilder(keep=is_concrete)(arrays)


class Dispatcher:
    """Finds, for each call of one function, the entry, and the fast path to it.

    **Arguments:**

    - `function`: held weakly where that is possible; who calls holds it.
    - `num_bound`: how many arguments at the front belong to what the user wrapped: the Module
        that is called, the instance of a bound method.
    - `donate`: see `check_donate`.
    - `jit_options`: further keyword arguments of `jax.jit`.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        num_bound: int,
        donate: Donate | Iterable[str],
        jit_options: dict[str, Any],
    ):
        try:
            self.get_function: Callable[[], Any] = weakref.ref(function)
        except TypeError:
            self.get_function = lambda: function
        self.num_bound = num_bound
        self.spelling = Spelling(function)
        self.donate = check_donate(donate, self.spelling)
        self.jit_options = jit_options
        self.lock = threading.Lock()
        self.entries: collections.OrderedDict[Hashable, Entry] = collections.OrderedDict()
        # The fast path of the entry called last, for calls that pass nothing by name; and the
        # last few for each set of names.
        self.fast_path: FastPath = always_miss
        self.recent: dict[tuple[str, ...], tuple[FastPath, ...]] = {}
        _dispatchers.add(self)

    def call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A call on its long way: the fast path, if any, was not made for it."""
        spelled, names = self.spelling.spell(args, kwargs)
        for fast_path in self.recent.get(names, ()):
            outcome = fast_path(spelled)
            if outcome is not MISS:
                if not names:
                    self.fast_path = fast_path
                return outcome
        arrays, entry = self.find(spelled, names)
        entry.ensure_traced(arrays)
        outcome = entry.finish(entry.jitted(*arrays))
        if all(type(array) in concrete_array_types for array in arrays) and not is_checking():
            self._remember(entry.fast_path(spelled), names)
        return outcome

    def find(
        self, spelled: tuple[Any, ...], names: tuple[str, ...], *, with_abstract: bool = False
    ) -> tuple[list[Any], Entry]:
        """The arrays of a spelled call, and the entry for it, new or old."""
        arrays: list[Any] = []
        structures: list[Structure] = []
        for arg in spelled:
            arg_arrays, structure = flatten(arg, with_abstract=with_abstract)
            arrays += arg_arrays
            structures.append(structure)
        key = (names, *structures)
        entry = self.entries.get(key)
        if entry is None:
            # Made outside the lock, since that may trace; of two made at once one is used.
            made = Entry(self, tuple(structures), names, spelled, arrays)
            with self.lock:
                entry = self.entries.setdefault(key, made)
                if len(self.entries) > _MAX_ENTRIES:
                    self.entries.popitem(last=False)
        return arrays, entry

    def _remember(self, fast_path: FastPath, names: tuple[str, ...]) -> None:
        recent = self.recent.get(names, ())
        others = tuple(each for each in recent if each is not fast_path)
        self.recent[names] = (fast_path, *others[: _MAX_RECENT - 1])
        if not names:
            self.fast_path = fast_path

    def forget_fast_paths(self) -> None:
        self.recent = {}
        self.fast_path = always_miss

    def drop(self, entry: Entry) -> None:
        with self.lock:
            for key in [key for key, each in self.entries.items() if each is entry]:
                del self.entries[key]
        self.forget_fast_paths()

    def clear(self) -> None:
        with self.lock:
            self.entries.clear()
        self.forget_fast_paths()


_dispatchers: weakref.WeakSet[Dispatcher] = weakref.WeakSet()


def clear_dispatchers() -> None:
    for dispatcher in list(_dispatchers):
        dispatcher.clear()


def _forget_all_fast_paths() -> None:
    for dispatcher in list(_dispatchers):
        dispatcher.forget_fast_paths()


when_switched_on(_forget_all_fast_paths)
