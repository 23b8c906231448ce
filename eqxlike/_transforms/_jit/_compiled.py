"""One compiled function, for one combination of Structures of the arguments."""

import itertools
import threading
import warnings
import weakref
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, Protocol

import jax
import jax.tree_util as jtu

from ..._compat import Tracer
from ..._module import Module, naming_layers
from ..._partition import ARRAY, StaticLeaf, Structure, are_concrete_arrays, flatten
from ..._pytree import is_array, is_reference
from ..._traceback import stacklevel_of_user
from .._checks import (
    TracedProgram,
    has_any_check_been_traced,
    holds_check,
    mesh_of,
    note_check,
    run_and_look_for_checks,
)
from .._sharding import shardings_of_arrays
from .._trace import refuse_references
from ._arguments import ArgumentOrder
from ._donation import Donate, DonationWarnings, donated_places
from ._fast_path import MISS, FastPath, make_fast_path
from ._in_shardings import shardings_of_arguments
from ._traces import History, Observer


class _Tracing(threading.local):
    depth: int = 0
    """The number of first traces that this thread is in the middle of."""


_tracing = _Tracing()


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


class Function(Protocol):
    """A `Dispatcher`, as far as a compiled function needs it."""

    get_function: Callable[[], Any]
    num_bound: int
    bound_names: tuple[str, ...]
    order: ArgumentOrder
    donate: Donate
    jit_options: dict[str, Any]
    history: History

    def drop(self, compiled: "CompiledFunction") -> None: ...


class CompiledFunction:
    """One compiled function.

    **Arguments:**

    - `function`: the function to compile; held weakly.
    - `structures`, `names`: the Structures of an ordered call's arguments, and the names of the
      last ones.
    - `ordered`: these arguments, as an example.
    """

    def __init__(
        self,
        function: Function,
        structures: tuple[Structure, ...],
        names: tuple[str, ...],
        ordered: tuple[Any, ...],
    ):
        self.structures = structures
        self.names = names
        labels = function.order.labels(len(ordered), names)
        drop = _weak_drop(function, self)
        self._observer = Observer(function.history, labels, structures, drop)
        self._trace_lock = threading.RLock()
        self._is_traced = False
        # Whether the first call itself traces it, and nobody has looked at the program before.
        self._is_unseen = False
        self._first_output: Structure | None = None
        # Whether there may be a check of which the result of the jitted function does not tell.
        self._always_waits = False
        self._fast_path: FastPath | None = None
        self._shown_fast_path: FastPath | None = None
        self.donation_warnings = DonationWarnings(function.donate)
        self._starts = [0, *itertools.accumulate(each.num_arrays for each in structures)]
        static = (
            each
            for each, structure in zip(ordered, structures, strict=True)
            if isinstance(structure, StaticLeaf)
        )
        self.watched = WatchedArrays(function.order.function_name, static)
        self._options = self._jit_options(function, ordered)
        self._has_shardings = _is_for_several_devices(
            (self._options.get("in_shardings"), self._options.get("out_shardings"))
        )
        # One sharding for all is a prefix of any output. A tree of them must wait until the
        # function has been traced.
        self._out_shardings: Any = None
        if not isinstance(self._options.get("out_shardings"), jax.sharding.Sharding | None):
            self._out_shardings = self._options.pop("out_shardings")
        self._flat_out_shardings: Any = None
        # The Structures of these very objects, as the compiled function is of these.
        self._passed = _as_passed(structures, ordered)
        self._flat = self._make_flat_function(function)
        must_wait = self._out_shardings is not None
        self._jitted = None if must_wait else jax.jit(self._flat, **self._options)

    def _jit_options(self, function: Function, ordered: tuple[Any, ...]) -> dict[str, Any]:
        """The options of `jax.jit` for the flat function."""
        options = dict(function.jit_options)
        places = donated_places(
            function.donate, function.order, function.num_bound, self.names, len(ordered)
        )
        starts = self._starts
        options["donate_argnums"] = [
            index for place in places for index in range(starts[place], starts[place + 1])
        ]
        if options.get("in_shardings") is not None:
            options["in_shardings"] = tuple(
                shardings_of_arguments(
                    options["in_shardings"],
                    function.order,
                    function.num_bound,
                    function.bound_names,
                    ordered,
                    self.names,
                )
            )
        return options

    def is_current(self) -> bool:
        """Whether the static objects that were passed are unchanged."""
        return all(structure.is_current() for structure in self._passed)

    def _make_flat_function(self, function: Function) -> Callable[..., Any]:
        """The function that JAX traces: flat arrays in, flat arrays out."""
        get_function = function.get_function
        observer = self._observer
        num_by_place = len(self.structures) - len(self.names)
        parts = [
            (structure.rebuilder(cache=False), start, stop)
            for structure, start, stop in zip(
                self._passed, self._starts[:-1], self._starts[1:], strict=True
            )
        ]

        labels = function.order.labels(len(self.structures), self.names)
        num_bound = function.num_bound

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
                with TracedProgram(self._has_shardings or mesh_of(arrays) is not None) as program:
                    is_later = self._is_traced and not jax.config.jax_disable_jit  # pyright: ignore
                    if is_later and has_any_check_been_traced():
                        output_arrays = run_and_look_for_checks(run, arrays)
                    else:
                        # `_trace_first` looks through the jaxpr of the first trace.
                        output_arrays = run(*arrays)
                packed = self._pack(output_arrays, structures[0], program.holds_check)
            except BaseException:
                observer.fail()
                raise
            if trace is not None:
                trace.clock.end()
            return packed

        flat.__name__ = flat.__qualname__ = function.order.function_name
        return flat

    def _take_apart(self, output: Any) -> tuple[list[Any], Structure]:
        arrays, structure = flatten(output, is_output=True)
        if not all(map(is_array, arrays)):
            refuse_references(output, self._flat.__name__, is_reference)
        if self._out_shardings is not None:
            shardings = shardings_of_arrays("out_shardings", self._out_shardings, output)
            self._flat_out_shardings = shardings[0] if structure is ARRAY else tuple(shardings)
        return arrays, structure

    def _pack(self, arrays: list[Any], structure: Structure, holds_check: bool) -> Any:
        if self._out_shardings is not None:
            # `out_shardings` are for plain arrays.
            self._always_waits |= holds_check
            holds_check = False
        self.donation_warnings.silence()
        with self._trace_lock:
            if self._first_output is None:
                self._first_output = structure
        # A plain tuple, or a bare array, says that the output is of the first Structure: JAX
        # builds these without calling Python, which it must for a node.
        if structure is not self._first_output or holds_check:
            return _TracedOutput((structure, holds_check), tuple(arrays))
        return arrays[0] if structure is ARRAY else tuple(arrays)

    def jitted(self, arrays: list[Any]) -> Any:
        """The function of flat arrays that `jax.jit` made, traced at least once.

        It is traced once even if several threads come first: JAX by itself would trace in each. A
        thread that is tracing never waits for another, so that two cannot wait for each other.
        """
        if self._must_wait():
            with self._trace_lock:
                if self._jitted is None or not self._is_traced:
                    self._trace_first(arrays)
        return jax.jit(self._flat) if self._jitted is None else self._jitted

    def _must_wait(self) -> bool:
        """Whether this thread traces first, or waits for the one that does."""
        is_traced = self._is_traced or (self._is_unseen and self._first_output is not None)
        if self._jitted is not None and (is_traced or _tracing.depth > 0):
            return False
        return not jax.config.jax_disable_jit  # pyright: ignore

    def _trace_first(self, arrays: list[Any]) -> None:
        _tracing.depth += 1
        try:
            if self._jitted is None:
                traced = jax.jit(self._flat, **self._options).trace(*arrays)
                self._options["out_shardings"] = self._flat_out_shardings
                self._jitted = jax.jit(self._flat, **self._options)
            else:
                traced = self._jitted.trace(*arrays)
        finally:
            _tracing.depth -= 1
        output = traced.out_info
        if type(output) is not _TracedOutput or not output.holds_check:
            # The trace takes no note of checks in functions that JAX has traced before.
            self._always_waits |= holds_check(traced.jaxpr.jaxpr)
        self._is_traced = True

    def call(self, arrays: list[Any]) -> Any:
        """The output of the user's function for these arrays."""
        try:
            return self.finish(self._run(arrays))
        finally:
            self.donation_warnings.restore()

    def _run(self, arrays: list[Any]) -> Any:
        """The result of the jitted function."""
        # Looking at the program before it runs makes JAX look at each array twice: with 5,000 of
        # them, that is a fourth of the first call.
        if self._jitted is not None and not has_any_check_been_traced() and self._must_wait():
            with self._trace_lock:
                if self._must_wait():
                    return self._run_first(self._jitted, arrays)
        return self.jitted(arrays)(*arrays)

    def _run_first(self, jitted: Any, arrays: list[Any]) -> Any:
        """Traces, compiles and runs, where no function can hide a check."""
        self._is_unseen = True
        _tracing.depth += 1
        try:
            result = jitted(*arrays)
        finally:
            _tracing.depth -= 1
        self._is_traced = True
        return result

    def fast_path(self, arrays: list[Any]) -> FastPath | None:
        """The fast path to this function; `None` while it has not been traced.

        **Arguments:**

        - `arrays`: the arrays of a call, as examples of their types.
        """
        if self._fast_path is None and self._first_output is not None and self._jitted is not None:
            may_wait = self._always_waits or self._out_shardings is not None
            self._fast_path = make_fast_path(
                self._passed,
                arrays,
                self._call_for_output if may_wait else self._jitted,
                self._first_output,
                self.finish,
                self.donation_warnings,
                self.watched.are_current if self.watched else None,
            )
            self._shown_fast_path = self._fast_path
            if any(structure.anchor is not None for structure in self.structures):
                self._shown_fast_path = _weak_fast_path(self)
        return self._shown_fast_path

    def _as_output(self, result: Any) -> _TracedOutput:
        """The result of the jitted function, with what plain arrays imply made explicit."""
        if type(result) is _TracedOutput:
            return result
        structure = self._first_output
        assert structure is not None
        arrays = (result,) if structure is ARRAY else result
        return _TracedOutput((structure, self._always_waits), arrays)

    def _call_for_output(self, *arrays: Any) -> _TracedOutput:
        """The result of the jitted function, but never plain arrays: these would skip `finish`."""
        assert self._jitted is not None
        return self._as_output(self._jitted(*arrays))

    def finish(self, result: Any) -> Any:
        """The output of the user's function, from what the jitted function returned."""
        output = self._as_output(result)
        structure, arrays = output.structure, output.arrays
        if output.holds_check:
            if any(isinstance(array, Tracer) for array in arrays):
                # The program that is being traced has this check too.
                note_check()
            else:
                jax.block_until_ready(arrays)
        if structure is ARRAY:
            return arrays[0]
        return structure.rebuilder(cache=are_concrete_arrays(arrays))(arrays)


def _as_passed(
    structures: tuple[Structure, ...], ordered: tuple[Any, ...]
) -> tuple[Structure, ...]:
    """The same Structures, with the very objects that were passed where equal ones will not do."""
    return tuple(
        structure
        if structure.is_exact
        else flatten(arg, with_abstract=True, is_bound=True, is_private=True)[1]
        for structure, arg in zip(structures, ordered, strict=True)
    )


def _is_for_several_devices(shardings: Any) -> bool:
    return any(
        isinstance(leaf, jax.sharding.Sharding) and leaf.num_devices > 1
        for leaf in jtu.tree_leaves(shardings)
    )


def _weak_drop(function: Function, compiled: CompiledFunction) -> Callable[[], None]:
    """A callback that drops `compiled`, and holds neither it nor the function."""
    weak_function, weak_compiled = weakref.ref(function), weakref.ref(compiled)

    def drop() -> None:
        function, compiled = weak_function(), weak_compiled()
        if function is not None and compiled is not None:
            function.drop(compiled)

    return drop


def _weak_fast_path(compiled: CompiledFunction) -> FastPath:
    """A fast path that does not hold `compiled`, which goes with a short-lived function."""
    weak_compiled = weakref.ref(compiled)

    def call(args: tuple[Any, ...]) -> Any:
        compiled = weak_compiled()
        fast_path = None if compiled is None else compiled._fast_path
        return MISS if fast_path is None else fast_path(args)

    return call


# Arrays held by a plain object that is an argument, such as the instance of a compiled method.
#
# The object is static and compared by identity, as for `jax.jit`. Its arrays became constants when
# the function was traced. If an attribute holds another array later, the call warns, once: the
# compiled function still has the old one.


class _Watched(NamedTuple):
    """An attribute that held an array."""

    holder: Any
    attributes: dict[str, Any]
    name: str
    array: Any

    def is_current(self) -> bool:
        return self.attributes.get(self.name) is self.array


class WatchedArrays:
    """The arrays among the attributes of static arguments, as they were when this was made.

    **Arguments:**

    - `name`: the name of the function that is traced.
    - `static`: its static arguments.
    """

    def __init__(self, name: str, static: Iterable[Any]):
        self._name = name
        self._watched = [
            _Watched(each, attributes, attribute, value)
            for each in static
            if not isinstance(each, Module | type)
            and type(attributes := getattr(each, "__dict__", None)) is dict
            for attribute, value in attributes.items()
            if is_array(value)
        ]

    def __bool__(self) -> bool:
        return bool(self._watched)

    def are_current(self) -> bool:
        """Whether all attributes still hold these arrays."""
        # This runs at each call: a loop takes half the time of `all`.
        for _, attributes, name, array in self._watched:  # noqa: SIM110
            if attributes.get(name) is not array:
                return False
        return True

    def warn_of_changes(self) -> None:
        """Warns of each attribute that no longer holds its array, once."""
        changed = [each for each in self._watched if not each.is_current()]
        if changed:
            self._watched = [each for each in self._watched if each.is_current()]
        for watched in changed:
            type_name = type(watched.holder).__name__
            warnings.warn(
                f"`{type_name}.{watched.name}` held an array when `{self._name}` was traced, and "
                f"has been assigned since. A {type_name} is no Module: it is static, by identity, "
                "and what was compiled still has the old array. Make it an `eqxlike.Module`, or "
                "pass the array as an argument.",
                stacklevel=stacklevel_of_user(),
            )
