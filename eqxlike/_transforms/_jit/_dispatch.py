"""A call, from its arguments to what JAX compiled for them, in the order in which it happens.

A `Dispatcher`, one for each function and its options, finds the `CompiledFunction` for the
arguments of a call: one, and one `jax.jit` of a function of flat arrays, for each combination of
their Structures. JAX itself traces and compiles that once for each shape and dtype; each trace runs
`flat`, and so `Observer.begin`, which compares it with earlier ones. Later calls try the `FastPath`
first, a function that is generated for these Structures.
"""

import dataclasses
import itertools
import threading
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.tree_util as jtu

from ..._compat import Tracer
from ..._module import naming_layers
from ..._partition import (
    ARRAY,
    GuardWriter,
    StaticLeaf,
    Structure,
    are_concrete_arrays,
    concrete_array_types,
    flatten,
    is_checking,
    when_switched_on,
)
from ..._pytree import is_array, is_reference
from ..._traceback import compile_function
from ..._transfers import is_any_exclusive, refuse_leaving, when_exclusive
from .._checks import (
    TracedProgram,
    has_any_check_been_traced,
    holds_check,
    mesh_of,
    note_check,
    run_and_look_for_checks,
)
from .._eval_shape import refuse_references
from .._sharding import are_for_several_devices, shardings_of_arrays
from ._arguments import ArgumentOrder, WatchedArrays, check_in_shardings, shardings_of_arguments
from ._cache import Cache
from ._donation import Donate, DonationWarnings, check_donate, donated_places
from ._traces import History, Observer

_MAX_RECENT = 16
"""At most this many fast paths are tried before the long way. They serve functions that are called
with different static values in turn.
"""

FastPath = Callable[[tuple[Any, ...]], Any]

MISS = object()
"""A fast path returns this for arguments that it was not made for."""


def _always_miss(args: tuple[Any, ...]) -> Any:
    """The fast path of a function that has not been called yet."""
    return MISS


class Dispatcher:
    """Finds, for each call of one function, the compiled function and the fast path to it.

    **Arguments:**

    - `function`: the function to compile; held weakly where that is possible, as the caller holds
      it.
    - `unbound_function`: the function whose signature calls have to fit. It may be replaced later,
      if `function` only calls what is bound to it.
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
        *,
        function: Callable[..., Any],
        unbound_function: Callable[..., Any],
        num_bound: int,
        bound_names: tuple[str, ...],
        order: ArgumentOrder,
        donate: Donate | Iterable[str],
        jit_options: dict[str, Any],
        history: History,
        full_name: str,
    ):
        self.get_function = _reference(function)
        self.get_unbound_function = _reference(unbound_function)
        self.num_bound = num_bound
        self.bound_names = bound_names
        self.order = order
        self.donate = check_donate(donate, self.order)
        check_in_shardings(jit_options.get("in_shardings"), self.order)
        self.jit_options = jit_options
        self.history = history
        self.full_name = full_name
        self.lock = threading.RLock()
        self.cache: Cache[CompiledFunction] = Cache()
        # The fast path that was taken last, for calls that pass nothing by name; and the last few,
        # with the names that they are for.
        self.fast_path: FastPath = _always_miss
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
            self.refuse_leaving(ordered, names, arrays, compiled)
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
    ) -> tuple[list[Any], "CompiledFunction"]:
        """The arrays of an ordered call, and the compiled function for it, new or old."""
        arrays: list[Any] = []
        structures: list[Structure] = []
        for index, arg in enumerate(ordered):
            arg_arrays, structure = flatten(
                arg,
                with_abstract=with_abstract,
                by_identity=index < self.num_bound,
                root=lambda index=index: self.order.labels(len(ordered), names)[index],
            )
            arrays += arg_arrays
            structures.append(structure)
        key = (names, *structures)
        compiled = self.cache.get(key, structures)
        if compiled is not None and not compiled.is_current():
            self.drop(compiled)
            compiled = None
        if compiled is None:
            made = CompiledFunction(self, tuple(structures), names, ordered)
            with self.lock:
                compiled = self.cache.setdefault(key, structures, made)
        return arrays, compiled

    def refuse_leaving(
        self,
        ordered: tuple[Any, ...],
        names: tuple[str, ...],
        arrays: list[Any],
        compiled: "CompiledFunction",
    ) -> None:
        """Raises `TransferError` if this call would leave the device of an exclusive context."""

        def trace() -> Any:
            with compiled.donation_warnings:
                return compiled.jitted(arrays).trace(*arrays).jaxpr

        labels = self.order.labels(len(ordered), names)
        labelled = list(zip(labels, ordered, strict=True))
        refuse_leaving(self.order.function_name, labelled, trace)

    def _remember(self, fast_path: FastPath, names: tuple[str, ...]) -> None:
        others = (each for each in self.recent if each[1] is not fast_path)
        self.recent = ((names, fast_path), *itertools.islice(others, _MAX_RECENT - 1))
        if not names:
            self.fast_path = fast_path

    def forget_fast_paths(self) -> None:
        self.recent = ()
        self.fast_path = _always_miss

    def drop(self, compiled: "CompiledFunction") -> None:
        with self.lock:
            self.cache.remove(compiled.structures, compiled)
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


# --- What is compiled for arguments of one form ---


class _Tracing(threading.local):
    """A context for a first trace.

    - `depth`: how many this thread is in the middle of.
    """

    depth: int = 0

    def __enter__(self) -> None:
        self.depth += 1

    def __exit__(self, *exception: Any) -> None:
        self.depth -= 1


_tracing = _Tracing()


@dataclasses.dataclass
class _FirstTrace:
    """What is known of a compiled function from its first trace on.

    - `lock`: held by the thread that traces first.
    - `is_done`: whether it has ended.
    - `is_part_of_call`: whether the first call traces, with no look at the program before it runs.
    - `output`: the Structure of the output; `None` before.
    - `may_hold_check`: whether there may be a check that the jitted function's result omits.
    """

    lock: Any = dataclasses.field(default_factory=threading.RLock)
    is_done: bool = False
    is_part_of_call: bool = False
    output: Structure | None = None
    may_hold_check: bool = False


class CompiledFunction:
    """One compiled function, for one combination of Structures of the arguments.

    What a call does about the first trace depends on what `_FirstTrace` knows:

    | state | `is_part_of_call` | `output` | `is_done` | a call |
    |---|---|---|---|---|
    | not traced | no | | no | traces, alone or as part of its run, or waits for who does |
    | a run traces | yes | `None` | no | waits for that trace |
    | that run has traced | yes | known | no | runs |
    | traced | | known | yes | runs |

    A trace alone looks for checks in the program before it runs. One that is part of a run does
    not: as long as no check was traced at all, no function can hide one.

    **Arguments:**

    - `dispatcher`: that of the function to compile; held weakly.
    - `structures`, `names`: the Structures of an ordered call's arguments, and the names of the
      last ones.
    - `ordered`: these arguments, as an example.
    """

    def __init__(
        self,
        dispatcher: Dispatcher,
        structures: tuple[Structure, ...],
        names: tuple[str, ...],
        ordered: tuple[Any, ...],
    ):
        self.structures = structures
        self.names = names
        self.donation_warnings = DonationWarnings(dispatcher.donate)
        pairs = list(zip(ordered, structures, strict=True))
        static = [arg for arg, structure in pairs if isinstance(structure, StaticLeaf)]
        self.watched = WatchedArrays(dispatcher.order.function_name, static)
        # The Structures of these very objects, as the compiled function is of these.
        self._passed = [_as_passed(arg, structure) for arg, structure in pairs]
        self._options = self._jit_options(dispatcher, ordered)
        self._first_trace = _FirstTrace()
        self._fast_path: FastPath | None = None
        self._shown_fast_path: FastPath | None = None
        self._flat = self._make_flat_function(dispatcher)
        # One sharding for all is a prefix of any output, so that `jax.jit` can have it now. A tree
        # of them is a prefix of the output as it is known after the first trace.
        self._out_shardings: Any = None
        self._jitted: Any = None
        if isinstance(self._options.get("out_shardings"), jax.sharding.Sharding | None):
            self._jitted = jax.jit(self._flat, **self._options)
        else:
            self._out_shardings = self._options.pop("out_shardings")

    def _jit_options(self, dispatcher: Dispatcher, ordered: tuple[Any, ...]) -> dict[str, Any]:
        """The options of `jax.jit` for the function of flat arrays."""
        order, num_bound, names = dispatcher.order, dispatcher.num_bound, self.names
        starts = _starts(self.structures)
        places = donated_places(dispatcher.donate, order, num_bound, names, len(ordered))
        donated = [index for place in places for index in range(starts[place], starts[place + 1])]
        options = {**dispatcher.jit_options, "donate_argnums": donated}
        if (in_shardings := options.get("in_shardings")) is not None:
            bound_names = dispatcher.bound_names
            options["in_shardings"] = tuple(
                shardings_of_arguments(in_shardings, order, num_bound, bound_names, ordered, names)
            )
        return options

    def is_current(self) -> bool:
        """Whether the static objects that were passed are unchanged."""
        return all(structure.is_current() for structure in self._passed)

    def call(self, arrays: list[Any]) -> Any:
        """The output of the user's function for these arrays."""
        with self.donation_warnings:
            return self.finish(self._run(arrays))

    def _run(self, arrays: list[Any]) -> Any:
        """The result of the jitted function."""
        # Looking at the program before it runs makes JAX look at each array twice: with 5,000 of
        # them, that is a fourth of the first call.
        if self._jitted is not None and not has_any_check_been_traced() and self._needs_trace():
            with self._first_trace.lock:
                if self._needs_trace():
                    # Traces, compiles and runs, where no function can hide a check.
                    self._first_trace.is_part_of_call = True
                    with _tracing:
                        result = self._jitted(*arrays)
                    self._first_trace.is_done = True
                    return result
        return self.jitted(arrays)(*arrays)

    def _needs_trace(self) -> bool:
        """Whether this thread makes the first trace, or waits for the thread that does."""
        first = self._first_trace
        is_traced = first.is_done or (first.is_part_of_call and first.output is not None)
        if self._jitted is not None and (is_traced or _tracing.depth > 0):
            return False
        return not jax.config.jax_disable_jit  # pyright: ignore

    def jitted(self, arrays: list[Any]) -> Any:
        """The function of flat arrays that `jax.jit` made, traced at least once.

        It is traced once even if several threads come first: JAX by itself would trace in each. A
        thread that is tracing never waits for another, so that two cannot wait for each other.
        """
        if self._needs_trace():
            with self._first_trace.lock:
                if self._jitted is None or not self._first_trace.is_done:
                    self._trace_first(arrays)
        return jax.jit(self._flat) if self._jitted is None else self._jitted

    def _trace_first(self, arrays: list[Any]) -> None:
        with _tracing:
            if self._jitted is None:
                traced = jax.jit(self._flat, **self._options).trace(*arrays)
                self._jitted = jax.jit(self._flat, **self._options)
            else:
                traced = self._jitted.trace(*arrays)
        output = traced.out_info
        if type(output) is not _TracedOutput or not output.holds_check:
            # The trace takes no note of checks in functions that JAX has traced before.
            self._first_trace.may_hold_check |= holds_check(traced.jaxpr.jaxpr)
        self._first_trace.is_done = True

    def _make_flat_function(self, dispatcher: Dispatcher) -> Callable[..., Any]:
        """The function that JAX traces: flat arrays in, flat arrays out."""
        get_function, num_bound = dispatcher.get_function, dispatcher.num_bound
        labels = dispatcher.order.labels(len(self.structures), self.names)
        weak_dispatcher = weakref.ref(dispatcher)

        def drop() -> None:
            if (found := weak_dispatcher()) is not None:
                found.drop(self)

        observer = Observer(dispatcher.history, labels, self.structures, drop)
        num_by_place = len(self.structures) - len(self.names)
        starts = _starts(self.structures)
        parts = [
            (structure.rebuilder(cache=False), start, stop)
            for structure, start, stop in zip(self._passed, starts[:-1], starts[1:], strict=True)
        ]
        is_sharded = are_for_several_devices(
            (self._options.get("in_shardings"), dispatcher.jit_options.get("out_shardings"))
        )

        def flat(*arrays: Any) -> Any:
            trace = observer.begin(arrays)
            structures: list[Structure] = []

            def run(*arrays: Any) -> list[Any]:
                args = [rebuild(arrays[start:stop]) for rebuild, start, stop in parts]
                kwargs = dict(zip(self.names, args[num_by_place:], strict=True))
                with naming_layers(args, labels, num_bound):
                    output = get_function()(*args[:num_by_place], **kwargs)
                output_arrays, structure = self._take_apart(output)
                structures.append(structure)
                return output_arrays

            try:
                with TracedProgram(is_sharded or mesh_of(arrays) is not None) as program:
                    is_done = self._first_trace.is_done
                    is_later = is_done and not jax.config.jax_disable_jit  # pyright: ignore
                    if is_later and has_any_check_been_traced():
                        output_arrays = run_and_look_for_checks(run, arrays)
                    else:
                        # No check was traced before, or `_trace_first` looks through the jaxpr.
                        output_arrays = run(*arrays)
                packed = self._pack(output_arrays, structures[0], program.holds_check)
            except BaseException:
                observer.fail()
                raise
            if trace is not None:
                trace.clock.end()
            return packed

        flat.__name__ = flat.__qualname__ = dispatcher.order.function_name
        return flat

    def _take_apart(self, output: Any) -> tuple[list[Any], Structure]:
        arrays, structure = flatten(output, is_output=True)
        if not all(map(is_array, arrays)):
            refuse_references(output, self._flat.__name__, is_reference)
        if self._out_shardings is not None:
            shardings = shardings_of_arrays("out_shardings", self._out_shardings, output)
            in_form = shardings[0] if structure is ARRAY else tuple(shardings)
            # For `jax.jit` of the function, which is made once it has been traced.
            self._options["out_shardings"] = in_form
        return arrays, structure

    def _pack(self, arrays: list[Any], structure: Structure, holds_check: bool) -> Any:
        if self._out_shardings is not None:
            # `out_shardings` are for plain arrays.
            self._first_trace.may_hold_check |= holds_check
            holds_check = False
        self.donation_warnings.silence()
        first = self._first_trace
        with first.lock:
            if first.output is None:
                first.output = structure
        # A plain tuple, or a bare array, says that the output is of the first Structure: JAX
        # builds these without calling Python, which it must for a node.
        if structure is not first.output or holds_check:
            return _TracedOutput((structure, holds_check), tuple(arrays))
        return arrays[0] if structure is ARRAY else tuple(arrays)

    def finish(self, result: Any) -> Any:
        """The output of the user's function, from what the jitted function returned."""
        if type(result) is _TracedOutput:
            structure, arrays, holds_check = result.structure, result.arrays, result.holds_check
        else:
            # Plain arrays: see `_pack`.
            structure, holds_check = self._first_trace.output, self._first_trace.may_hold_check
            assert structure is not None
            arrays = (result,) if structure is ARRAY else result
        if holds_check:
            if any(isinstance(array, Tracer) for array in arrays):
                # The program that is being traced has this check too.
                note_check()
            else:
                jax.block_until_ready(arrays)
        if structure is ARRAY:
            return arrays[0]
        return structure.rebuilder(cache=are_concrete_arrays(arrays))(arrays)

    def fast_path(self, arrays: list[Any]) -> FastPath | None:
        """The fast path to this function; `None` while it has not been traced.

        **Arguments:**

        - `arrays`: the arrays of a call, as examples of their types.
        """
        output = self._first_trace.output
        if self._fast_path is None and output is not None and self._jitted is not None:
            self._fast_path = self._make_fast_path(arrays, self._jitted, output)
            self._shown_fast_path = self._fast_path
            if any(structure.anchor is not None for structure in self.structures):
                self._shown_fast_path = _weak_fast_path(self)
        return self._shown_fast_path

    def _make_fast_path(self, arrays: list[Any], jitted: Any, output: Structure) -> FastPath:
        """The warm call: a generated function from arguments of these Structures to the output.

        It asks whether the arguments have these Structures and hands their arrays to JAX. It looks
        up, hashes and allocates nothing that the call does not need. For other arguments it returns
        `MISS`.
        """
        writer = GuardWriter(flatten, arrays, MISS)
        names = writer.unpack("args", len(self._passed))
        for name, structure in zip(names, self._passed, strict=True):
            writer.write(structure, name)
        if self.watched:
            writer.miss_if(f"not {writer.constant(self.watched.are_current)}()")
        lines = writer.function("call(args)")
        call = f"result = jitted({', '.join(writer.arrays)})"
        if self.donation_warnings.to_restore is None:
            lines.append(f"    {call}")
        else:
            lines += ["    try:", f"        {call}", "    finally:"]
            lines.append("        if to_restore: restore_warnings()")
        # Plain arrays are the output, but where a check may be waited for. Inside another
        # transformation, concrete arguments may give tracers: `finish` sees to them.
        if self._first_trace.may_hold_check or self._out_shardings is not None:
            pass
        elif output is ARRAY:
            lines.append("    if type(result) in array_types: return result")
        elif output.num_arrays:
            lines.append("    if type(result) is tuple and type(result[0]) in array_types:")
            lines.append("        return rebuild(result)")
        else:
            lines.append("    if type(result) is tuple: return rebuild(result)")
        lines.append("    return finish(result)")
        namespace = {
            **writer.namespace,
            "array_types": concrete_array_types,
            "jitted": jitted,
            "rebuild": output.rebuilder(cache=True),
            "finish": self.finish,
            "restore_warnings": self.donation_warnings.restore,
            "to_restore": self.donation_warnings.to_restore,
        }
        return compile_function(lines, namespace, "fast path")


def _as_passed(arg: Any, structure: Structure) -> Structure:
    """The same Structure, with the very objects that were passed where equal ones will not do."""
    if structure.is_exact:
        return structure
    return flatten(arg, with_abstract=True, by_identity=True, is_private=True)[1]


def _starts(structures: tuple[Structure, ...]) -> list[int]:
    """Where the arrays of each argument begin among those of all; at last, how many there are."""
    return [0, *itertools.accumulate(each.num_arrays for each in structures)]


def _weak_fast_path(compiled: CompiledFunction) -> FastPath:
    """A fast path that does not hold `compiled`, which goes with a short-lived function."""
    weak_compiled = weakref.ref(compiled)

    def call(args: tuple[Any, ...]) -> Any:
        compiled = weak_compiled()
        fast_path = None if compiled is None else compiled._fast_path
        return MISS if fast_path is None else fast_path(args)

    return call


class _TracedOutput:
    """The output that a traced function returns to JAX where plain arrays do not say enough.

    That is so if its static part is not that of the first trace, or if the program holds a check of
    `error_if`, for which the call waits. JAX's fast path needs a node that unflattens to plain
    arrays and can be flattened again, so this holds arrays, and the tree is built outside.
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
