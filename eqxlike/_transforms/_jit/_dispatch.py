"""The slow path of a call, from its arguments to `jax.jit` and back, in order of execution.

Each function, with its options, has a `Dispatcher`. The dispatcher makes one `CompiledFunction` for
each combination of Structures of the arguments. A `CompiledFunction` holds `jax.jit(flat)`, where
`flat` is a function of flat arrays. A Structure does not contain shapes. So a call with other
shapes finds the same `CompiledFunction`, and JAX traces and compiles `flat` again. Each trace runs
`flat`, which calls `Observer.begin` to record the trace. Later calls first try a `FastPath`, a
function that is generated for the Structures of their arguments.
"""

import contextlib
import functools
import itertools
import threading
import types
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any

import jax
import jax.tree_util as jtu

from ..._compat import Tracer
from ..._module import naming_layers
from ..._partition import (
    ARRAY,
    StaticLeaf,
    Structure,
    are_concrete_arrays,
    concrete_array_types,
    flatten,
    is_checking,
    when_switched_on,
)
from ..._pytree import ARRAY_TYPES, is_reference
from .._checks import (
    TracedProgram,
    has_any_check_been_traced,
    holds_check,
    note_check,
    run_and_look_for_checks,
)
from .._flat_call import refuse_references, shardings_of_arrays
from ._arguments import (
    ArgumentOrder,
    Unbound,
    attached,
    call_it,
    check_donate,
    check_in_shardings,
    donated_places,
    shardings_of_arguments,
)
from ._fast_path import (
    HIDES_WARNINGS,
    MISS,
    DonationWarnings,
    FastPath,
    WatchedArrays,
    always_miss,
    make_fast_path,
    weak_fast_path,
)
from ._traces import History, Observer

_MAX_CACHED = 4096
"""A table has at most this many compiled functions. The oldest are dropped first."""

_CACHED_WITHIN_S = 1.0
"""JAX usually caches a trace within this many seconds after the user's function returns."""

_MAX_RECENT = 16
"""At most this many fast paths are tried before the slow path. A function that is called with
different static values in turn needs several fast paths.
"""

_Table = OrderedDict[Hashable, "CompiledFunction"]
_OF_CLOSURE = "__eqxlike_compiled__"
"""The name in the `__dict__` of a short-lived function that holds its tables."""


class Dispatcher:
    """Finds the compiled function, or a fast path to it, for each call of one function.

    **Arguments:**

    - `unbound`: the function to compile and its bound arguments. The function is held weakly if
      possible; the caller keeps it alive.
    - `order`: the order of the function's arguments.
    - `donate`: see `check_donate`.
    - `jit_options`: keyword arguments of `jax.jit`, except the arguments for donation.
    - `history`: records the traces of the function. It is empty at first.
    - `full_name`: the name of the function, with its module.
    """

    def __init__(
        self,
        unbound: Unbound,
        order: ArgumentOrder,
        donate: Any,
        jit_options: dict[str, Any],
        history: History,
        full_name: str,
    ):
        # The `__call__` of a class may be replaced later, so call the instance.
        self.get_unbound_function = _reference(unbound.function)
        self.get_function = _reference(call_it if unbound.is_call else unbound.function)
        self.order, self.num_bound = order, order.num_bound
        self.donate = check_donate(donate, order)
        check_in_shardings(jit_options.get("in_shardings"), order)
        self.jit_options = jit_options
        self.history = history
        self.full_name = full_name
        self.lock = threading.RLock()
        # `_lasting` is a table of compiled functions. `_closures` has the short-lived functions
        # that have tables of their own.
        self._lasting: _Table = OrderedDict()
        self._closures: weakref.WeakSet[types.FunctionType] = weakref.WeakSet()
        # `fast_path` is the fast path that was used last for a call without keyword arguments.
        # `recent` has the fast paths that were used last, the newest first, each with the names of
        # the keyword arguments that it takes.
        self.fast_path: FastPath = always_miss
        self.recent: tuple[tuple[tuple[str, ...], FastPath], ...] = ()
        _dispatchers.add(self)

    def call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The output of a call by the slow path, after `fast_path` has missed."""
        ordered, names = self.order.arrange(args, kwargs)
        # `recent` usually includes the fast path that has just missed. That fast path was called
        # with `args`. It is tried again with `ordered`, which also has the defaults of omitted
        # arguments.
        for recent_names, fast_path in self.recent:
            if recent_names == names:
                output = fast_path(ordered)
                if output is not MISS:
                    if fast_path is not self.recent[0][1]:
                        self._remember(fast_path, names)
                    return output
        arrays, compiled = self.find(ordered, names)
        if compiled.watched is not None:
            compiled.watched.warn_of_changes()
        was_checking = is_checking()
        output = compiled.call(arrays)
        if all(type(array) in concrete_array_types for array in arrays) and not was_checking:
            fast_path = compiled.fast_path(arrays)
            if fast_path is not None:
                self._remember(fast_path, names)
                if is_checking():
                    # Another thread has switched checking on during this call. This cleared the
                    # fast paths, but `fast_path` was added later. So clear it too.
                    self.forget_fast_paths()
        return output

    def find(
        self, ordered: tuple[Any, ...], names: tuple[str, ...], *, with_abstract: bool = False
    ) -> tuple[list[Any], "CompiledFunction"]:
        """Flattens an ordered call. Returns its arrays and the compiled function for it."""
        arrays: list[Any] = []
        structures: list[Structure] = []
        for index, arg in enumerate(ordered):
            # Bound arguments may be unhashable, as for `filter_jit(instance.method)`. In Python, a
            # bound method is hashable even if its instance is not. So `jax.jit` accepts the method,
            # and `filter_jit` must accept it too.
            arg_arrays, structure = flatten(
                arg,
                with_abstract=with_abstract,
                by_identity=index < self.num_bound,
                root=lambda index=index: self.order.labels(len(ordered), names)[index],
            )
            arrays += arg_arrays
            structures.append(structure)
        key = names, tuple(structures)
        table = self._table(structures)
        compiled = table.get(key)
        if compiled is not None and not compiled.is_current():
            self.drop(compiled)
            compiled = None
        if compiled is None:
            made = CompiledFunction(self, key, ordered)
            with self.lock:
                compiled = table.setdefault(key, made)
                if len(table) > _MAX_CACHED:
                    table.popitem(last=False)
        return arrays, compiled

    def _table(self, structures: Sequence[Structure]) -> _Table:
        """The table of compiled functions for arguments with these Structures.

        A key of a table holds the static leaves of the arguments. If one of these leaves is a
        short-lived function, the table is in the `__dict__` of this function. So Python frees the
        table with the function. An entry in `_lasting` would keep the function alive until
        thousands of newer entries replace it.
        """
        closure = next((each.anchor for each in structures if each.anchor is not None), None)
        if closure is None:
            return self._lasting
        self._closures.add(closure)
        tables = attached(closure, _OF_CLOSURE, weakref.WeakKeyDictionary)
        return tables.setdefault(self, OrderedDict())

    def compiled_functions(self) -> "Iterator[CompiledFunction]":
        for table in self._tables():
            yield from list(table.values())

    def _tables(self) -> list[_Table]:
        closures = list(self._closures)
        tables = (attached(each, _OF_CLOSURE, weakref.WeakKeyDictionary) for each in closures)
        return [self._lasting, *(each[self] for each in tables if self in each)]

    def _remember(self, fast_path: FastPath, names: tuple[str, ...]) -> None:
        others = (each for each in self.recent if each[1] is not fast_path)
        self.recent = ((names, fast_path), *itertools.islice(others, _MAX_RECENT - 1))
        if not names:
            self.fast_path = fast_path

    def forget_fast_paths(self) -> None:
        self.recent = ()
        self.fast_path = always_miss

    def drop(self, compiled: "CompiledFunction") -> None:
        with self.lock:
            table = self._table(compiled.key[1])
            if table.get(compiled.key) is compiled:
                del table[compiled.key]
        self.forget_fast_paths()

    def clear(self) -> None:
        with self.lock:
            for table in self._tables():
                table.clear()
            self.history = self.history.emptied()
        self.forget_fast_paths()


def _reference(function: Callable[..., Any]) -> Callable[[], Any]:
    """A function that returns `function`, and holds it weakly if possible."""
    try:
        return weakref.ref(function)
    except TypeError:
        return lambda: function


_dispatchers: weakref.WeakSet[Dispatcher] = weakref.WeakSet()


def clear_caches() -> None:
    """Forgets everything that filtered functions have compiled. The next calls trace again.

    `jax.clear_caches` does the same for JAX's own caches.
    """
    for dispatcher in list(_dispatchers):
        dispatcher.clear()


def _forget_all_fast_paths() -> None:
    for dispatcher in list(_dispatchers):
        dispatcher.forget_fast_paths()


when_switched_on(_forget_all_fast_paths)


# --- A compiled function: the function that JAX traces, its first trace, and its calls ---


class _Tracing(threading.local):
    """Context manager around the first trace of a `CompiledFunction`.

    - `depth`: the number of nested first traces that run in this thread.
    """

    depth: int = 0

    def __enter__(self) -> None:
        self.depth += 1

    def __exit__(self, *exception: Any) -> None:
        self.depth -= 1


_tracing = _Tracing()


class CompiledFunction:
    """The compiled function for one combination of Structures of the arguments.

    - `key`: the key in the table of the dispatcher. It has the names of the last arguments of an
      ordered call, and the Structures of all arguments.
    - `structures`: the Structures of the objects that the first call passed, not of equal objects.
      The function is compiled for these Structures.
    - `watched`: the arrays in attributes of static arguments. `None` if there are no static
      arguments.
    - `donation_warnings`: hides JAX's warnings, if `donate` is a value without warnings.

    The private attributes are the jitted function and the state of its first trace:

    - `_jitted`: `jax.jit` of the function of flat arrays. `None` until `_make_jitted` has made it.
    - `_make_jitted`: a function that makes `_jitted`; `None` if `_jitted` exists from the start.
      The function is needed if `out_shardings` is a tree, that is, a prefix of the output. Then the
      first trace finds the structure of the output, and `_make_jitted` is called with one sharding
      for each flat output.
    - `_out_shardings`: the shardings of the flat outputs, for `_make_jitted`.
    - `_lock`: held by the thread that makes the first trace.
    - `_is_done`: whether the first trace has ended.
    - `_is_part_of_call`: whether the first trace is part of the first run. If so, the program is
      not searched for checks before it runs.
    - `_output`: the Structure of the output. `None` before the first trace.
    - `_may_hold_check`: whether the program may contain a check although its result has no flag for
      it.

    The state decides how a call handles the first trace:

    | state | `_is_part_of_call` | `_output` | `_is_done` | a call |
    |---|---|---|---|---|
    | not traced | no | | no | traces, or waits for the thread that does |
    | a run traces | yes | `None` | no | waits for that trace |
    | that run has traced | yes | known | no | waits a short time for that run, then runs |
    | traced | | known | yes | runs |

    The first trace is part of a run only if no check has been traced in this process. Then no
    jitted function that was traced earlier contains a check, so the program needs no search. All
    other first traces are made before a run, and search the program for checks.

    **Arguments:**

    - `dispatcher`: the dispatcher of the function to compile; held weakly.
    - `ordered`: the arguments of an ordered call that needs this function.
    - `history`: records the traces. By default, the history of the dispatcher.
    """

    def __init__(
        self,
        dispatcher: Dispatcher,
        key: tuple[tuple[str, ...], tuple[Structure, ...]],
        ordered: tuple[Any, ...],
        history: History | None = None,
    ):
        self.key = key
        pairs = list(zip(ordered, key[1], strict=True))
        self.structures = [_as_passed(arg, structure) for arg, structure in pairs]
        static = [arg for arg, structure in pairs if isinstance(structure, StaticLeaf)]
        self.watched = WatchedArrays(dispatcher.order.function_name, static) if static else None
        is_silent = dispatcher.donate in HIDES_WARNINGS
        self.donation_warnings = DonationWarnings() if is_silent else None
        self.own_fast_path: FastPath | None = None
        self._fast_path_to_remember: FastPath | None = None
        self._jitted: Any = None
        self._make_jitted: Any = None
        self._out_shardings: Any = None
        self._lock = threading.RLock()
        self._is_done = False
        self._is_part_of_call = False
        self._output: Structure | None = None
        self._may_hold_check = False
        options = self._jit_options(dispatcher, ordered)
        flat = self._make_flat_function(dispatcher, options, history or dispatcher.history)
        if not isinstance(options.get("out_shardings"), jax.sharding.Sharding | None):
            del options["out_shardings"]
            self._make_jitted = functools.partial(jax.jit, flat, **options)
        else:
            self._jitted = jax.jit(flat, **options)

    def _jit_options(self, dispatcher: Dispatcher, ordered: tuple[Any, ...]) -> dict[str, Any]:
        """The options of `jax.jit` for the function of flat arrays."""
        order, names = dispatcher.order, self.key[0]
        options = dict(dispatcher.jit_options)
        # JAX itself disables donation for `jax.debug_nans`, but not for `jax.debug_infs`.
        if dispatcher.donate != "none" and not jax.config.jax_debug_infs:  # pyright: ignore
            ranges = _ranges(self.structures)
            places = donated_places(dispatcher.donate, order, names, len(ordered))
            options["donate_argnums"] = [*itertools.chain(*(ranges[place] for place in places))]
        if (in_shardings := options.get("in_shardings")) is not None:
            found = shardings_of_arguments(in_shardings, order, ordered, names)
            options["in_shardings"] = tuple(found)
        return options

    def _make_flat_function(
        self, dispatcher: Dispatcher, options: dict[str, Any], history: History
    ) -> Callable[..., Any]:
        """Makes the function that JAX traces. It takes flat arrays and returns flat arrays."""
        names, num_by_place = self.key[0], len(self.structures) - len(self.key[0])
        labels = dispatcher.order.labels(len(self.structures), names)
        get_function, num_bound = dispatcher.get_function, dispatcher.num_bound
        weak_dispatcher = weakref.ref(dispatcher)

        def drop() -> None:
            if (found := weak_dispatcher()) is not None:
                found.drop(self)

        observer = Observer(history, labels, self.key[1], drop)
        parts = [
            (structure.rebuilder(cache=False), places.start, places.stop)
            for structure, places in zip(self.structures, _ranges(self.structures), strict=True)
        ]
        out_shardings = options.get("out_shardings")
        shardings = options.get("in_shardings"), out_shardings

        def call_users_function(arrays: tuple[Any, ...]) -> tuple[list[Any], Structure]:
            args = [rebuild(arrays[start:stop]) for rebuild, start, stop in parts]
            kwargs = dict(zip(names, args[num_by_place:], strict=True))
            with naming_layers(args, labels, num_bound):
                output = get_function()(*args[:num_by_place], **kwargs)
            output_arrays, structure = flatten(output, is_output=True)
            if not all(isinstance(array, ARRAY_TYPES) for array in output_arrays):
                refuse_references(output, flat.__name__, is_reference)
            if self._make_jitted is not None:
                found = shardings_of_arrays("out_shardings", out_shardings, output)
                self._out_shardings = found[0] if structure is ARRAY else tuple(found)
            return output_arrays, structure

        def flat(*arrays: Any) -> Any:
            trace = observer.begin(arrays)
            structures: list[Structure] = []

            def run(*arrays: Any) -> list[Any]:
                output_arrays, structure = call_users_function(arrays)
                structures.append(structure)
                return output_arrays

            try:
                with TracedProgram(arrays, shardings) as traced:
                    is_done = self._is_done
                    is_later = is_done and not jax.config.jax_disable_jit  # pyright: ignore
                    if is_later and has_any_check_been_traced():
                        output_arrays = run_and_look_for_checks(run, arrays)
                    else:
                        # No search for checks is needed here. Either no check was traced before, or
                        # `_trace_first` searches the jaxpr.
                        output_arrays = run(*arrays)
                packed = self._pack(output_arrays, structures[0], traced.holds_check)
            except BaseException:
                observer.fail()
                raise
            if trace is not None:
                trace.clock.end()
            return packed

        flat.__name__ = flat.__qualname__ = dispatcher.order.function_name
        return flat

    def _pack(self, arrays: list[Any], structure: Structure, holds_check: bool) -> Any:
        if self._make_jitted is not None:
            # `out_shardings` apply to plain arrays, not to a `_TracedOutput`.
            self._may_hold_check |= holds_check
            holds_check = False
        if self.donation_warnings is not None:
            self.donation_warnings.silence()
        with self._lock:
            if self._output is None:
                self._output = structure
        # Return a plain tuple, or a single array, if the output has the same Structure as in the
        # first trace. JAX builds a tuple or an array without running Python code. To build a
        # registered node, JAX must run Python code.
        if structure is not self._output or holds_check:
            return _TracedOutput((structure, holds_check), tuple(arrays))
        return arrays[0] if structure is ARRAY else tuple(arrays)

    def call(self, arrays: list[Any]) -> Any:
        """The output of the user's function for these arrays."""
        with self.donation_warnings or contextlib.nullcontext():
            return self.finish(self._run(arrays))

    def finish(self, result: Any) -> Any:
        """Converts the result of the jitted function to the output of the user's function."""
        if type(result) is _TracedOutput:
            structure, arrays, holds_check = result.structure, result.arrays, result.holds_check
        else:
            # The result is plain arrays: see `_pack`.
            structure, holds_check = self._output, self._may_hold_check
            assert structure is not None
            arrays = (result,) if structure is ARRAY else result
        if holds_check:
            if any(isinstance(array, Tracer) for array in arrays):
                # An outer program is being traced. It contains this check too.
                note_check()
            else:
                jax.block_until_ready(arrays)
        if structure is ARRAY:
            return arrays[0]
        return structure.rebuilder(cache=are_concrete_arrays(arrays))(arrays)

    def _run(self, arrays: list[Any]) -> Any:
        """The result of the jitted function."""
        # If the first trace is part of the first run, JAX processes each array once, not twice.
        # With 5,000 arrays, this saves a fourth of the first call.
        if self._jitted is not None and not has_any_check_been_traced() and self._needs_trace():
            with self._lock:
                if self._needs_trace():
                    # This call traces, compiles and runs. The trace cannot miss a check, because no
                    # check was traced before.
                    self._is_part_of_call = True
                    with _tracing:
                        result = self._jitted(*arrays)
                    self._is_done = True
                    return result
        return self.traced_jit(arrays)(*arrays)

    def _needs_trace(self) -> bool:
        """Returns `True` if this thread must make the first trace, or wait for it."""
        is_traced = self._is_done or (self._is_part_of_call and self._output is not None)
        if self._jitted is not None and (is_traced or _tracing.depth > 0):
            return False
        return not jax.config.jax_disable_jit  # pyright: ignore

    def traced_jit(self, arrays: list[Any]) -> Any:
        """The jitted function of flat arrays, after its first trace.

        If several threads call the function for the first time, only one of them traces. `jax.jit`
        alone would trace in each thread. To prevent deadlocks, a thread that is tracing never waits
        for another thread.
        """
        if self._needs_trace():
            with self._lock:
                if self._jitted is None or not self._is_done:
                    self._trace_first(arrays)
        elif not self._is_done and _tracing.depth == 0:
            # A first run has traced the user's function. Wait until JAX has cached the trace, but
            # not until a long run ends, because a host callback of the run may wait for this call.
            if self._lock.acquire(timeout=_CACHED_WITHIN_S):
                self._lock.release()
        # With `jax.disable_jit`, there is no first trace, so `jitted` may be missing.
        return self._make_jitted() if self._jitted is None else self._jitted

    def _trace_first(self, arrays: list[Any]) -> None:
        with _tracing:
            if self._make_jitted is None:
                traced = self._jitted.trace(*arrays)
            else:
                traced = self._make_jitted().trace(*arrays)
                self._jitted = self._make_jitted(out_shardings=self._out_shardings)
        output = traced.out_info
        if type(output) is not _TracedOutput or not output.holds_check:
            # JAX does not retrace an inner function that it has already traced. The checks in the
            # inner function are in the jaxpr, so search the jaxpr.
            self._may_hold_check |= holds_check(traced.jaxpr.jaxpr)
        self._is_done = True

    def is_current(self) -> bool:
        """Returns `True` if the static objects of the first call are unchanged."""
        return all(structure.is_current() for structure in self.structures)

    def fast_path(self, arrays: list[Any]) -> FastPath | None:
        """The fast path to this function. `None` if the function has not been traced yet.

        **Arguments:**

        - `arrays`: the arrays of a call, as examples of their types.
        """
        if self.own_fast_path is None and self._output is not None and self._jitted is not None:
            jitted, output = self._jitted, self._output
            always_finishes = self._may_hold_check or self._make_jitted is not None
            self.own_fast_path = self._fast_path_to_remember = make_fast_path(
                self, jitted, output, arrays, always_finishes
            )
            if any(structure.anchor is not None for structure in self.structures):
                self._fast_path_to_remember = weak_fast_path(self)
        return self._fast_path_to_remember


def _as_passed(arg: Any, structure: Structure) -> Structure:
    """The Structure of `arg` itself. `structure` may belong to another object that equals `arg`."""
    if structure.is_exact:
        return structure
    return flatten(arg, with_abstract=True, by_identity=True, is_private=True)[1]


def _ranges(structures: Sequence[Structure]) -> list[range]:
    """The indices of each argument's arrays among all arrays."""
    starts = [0, *itertools.accumulate(each.num_arrays for each in structures)]
    return list(map(range, starts, starts[1:]))


class _TracedOutput:
    """The output that a traced function returns to JAX, if plain arrays are not enough.

    Plain arrays are not enough in two cases. First, the output has another Structure than in the
    first trace. Second, the program contains a check of `error_if`, so the call must wait. JAX's
    fast path needs a node that unflattens to plain arrays and can be flattened again. So this node
    holds arrays, and `CompiledFunction.finish` makes the user's output from these arrays.
    """

    __slots__ = ("arrays", "holds_check", "structure")

    def __init__(self, static: tuple[Structure, bool], arrays: tuple[Any, ...]):
        self.structure, self.holds_check = static
        self.arrays = arrays


jtu.register_pytree_node(
    _TracedOutput,
    lambda output: (output.arrays, (output.structure, output.holds_check)),
    _TracedOutput,
)
