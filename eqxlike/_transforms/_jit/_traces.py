"""Keeps the traces of a function, compares each trace with earlier traces, and reports it."""

import collections
import contextlib
import dataclasses
import functools
import inspect
import itertools
import threading
import time
import types
import warnings
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import jax

from ..._module import Module
from ..._partition import Structure, Tree, describe, flatten, root_node
from ..._traceback import stacklevel_of_user
from ._arguments import WRAPPER
from ._differences import (
    Arguments,
    Settings,
    TraceDifference,
    another_function,
    describe_mesh,
    describe_static,
    find_differences,
    form_of_type,
    show_place,
)

_MAX_LISTED = 20
"""A message lists at most this many differences."""

_MAX_SHOWN = 4
"""The `repr` of a trace shows at most this many arguments."""


class Place(NamedTuple):
    """The name of a function, and the file and line of its definition, if they are known."""

    name: str
    file: str | None
    line: int | None

    def __str__(self) -> str:
        return f"`{self.name}`" if self.file is None else f"`{self.name}` ({self.file}:{self.line})"


class Clock:
    """The start and the duration of one trace. All copies of a `Trace` share one clock."""

    def __init__(self) -> None:
        self.started_at = time.time()
        self.took_s: float | None = None
        self._started = time.perf_counter()

    def end(self) -> None:
        self.took_s = time.perf_counter() - self._started


@dataclasses.dataclass(eq=False, repr=False, slots=True)
class Trace:
    """One trace of a compiled function. Its `str` lists the differences from an earlier trace.

    It holds descriptions of the arguments as text, but no arrays or other arguments.

    - `function`, `file`, `line`: the name of the function, and the place of its definition. `file`
      and `line` are `None` if the function is not written in Python.
    - `number`: the number of the trace, from 1.
    - `compared_with`: the number of the most similar earlier trace. `None` for the first trace.
    - `differences`: the differences from trace `compared_with`, as a tuple of at most 100
      `TraceDifference`.
    - `started_at`: the time at which the trace started, in seconds, as from `time.time()`.
    - `took_s`: the duration of the trace in seconds. It includes the traces of inner functions, but
      not lowering and compiling. `None` during the trace, and if the trace was refused.
    """

    function: str
    file: str | None
    line: int | None
    number: int
    _known: Arguments | Callable[[], Arguments]
    owner: int
    clock: Clock
    compared_with: int | None = None
    differences: tuple[TraceDifference, ...] = ()

    @property
    def place(self) -> Place:
        return Place(self.function, self.file, self.line)

    @property
    def known(self) -> Arguments:
        """The description of the arguments. It is often made on first use: see `History`."""
        known = self._known
        if not isinstance(known, Arguments):
            self._known = known = known()
        return known

    @property
    def started_at(self) -> float:
        return self.clock.started_at

    @property
    def took_s(self) -> float | None:
        return self.clock.took_s

    @property
    def arguments(self) -> dict[str, str]:
        """A text for each array and static value, such as `{"x[0]": "float32[8, 3]"}`."""
        return {path: str(leaf) for path, leaf in self.known.tree.leaves()}

    @property
    def settings(self) -> dict[str, str]:
        """The settings of JAX that affect a trace: a dictionary from names to values as text."""
        return dict(self.known.settings)

    def explain(self) -> str:
        """The differences, one on each line, and advice on how to avoid them."""
        if self.compared_with is None:
            return "The earlier traces are no longer known."
        if not self.differences:
            return (
                f"Arguments and settings are the same as in trace {self.compared_with}, so "
                "something else has changed: the caches were cleared, or the function is mapped "
                "over axes with other names, transformed differently, or jitted again for each "
                "call."
            )
        lines = [f"What differs from trace {self.compared_with}:"]
        lines += [f"  {each}" for each in self.differences[:_MAX_LISTED]]
        if len(self.differences) > _MAX_LISTED:
            lines.append(f"  and {len(self.differences) - _MAX_LISTED} more")
        advice = dict.fromkeys(each.advice for each in self.differences)
        return "\n".join([*lines, *advice])

    def __str__(self) -> str:
        if self.number == 1 and self.compared_with is None:
            return f"{self.place} is traced for the first time."
        return f"{self.place} is traced and compiled again (trace {self.number}). {self.explain()}"

    def __repr__(self) -> str:
        shown = [f"{path}: {text}" for path, text in self.arguments.items()]
        if len(shown) > _MAX_SHOWN:
            shown[_MAX_SHOWN:] = [f"and {len(shown) - _MAX_SHOWN} more"]
        return f"<trace {self.number} of {self.function}({', '.join(shown)})>"


# --- The reaction to a retrace: a warning, an error, or a call of the user's function ---


OnRetrace = Literal["warn", "error"] | Callable[[Trace], Any]
"""The values of `on_retrace` other than `None`."""


class RetraceWarning(UserWarning):
    """A compiled function is traced again: see `filter_jit(on_retrace="warn")`."""


class RetraceError(RuntimeError):
    """A compiled function would be traced again, but `on_retrace` or `max_traces` forbids it.

    - `trace`: the trace that was refused.
    """

    def __init__(self, message: str, trace: Trace | None = None):
        super().__init__(message)
        self.trace = trace


@dataclasses.dataclass(frozen=True, slots=True)
class Policy:
    """The options `on_retrace` and `max_traces` of a compiled function.

    A deep copy of a policy is the policy itself, so that a copied function calls the same callable.

    **Raises:** `ValueError` if `on_retrace` or `max_traces` is invalid.
    """

    # `on_retrace` is not hashed, because a callable need not be hashable.
    on_retrace: OnRetrace | None = dataclasses.field(hash=False)
    max_traces: int | None

    def __post_init__(self) -> None:
        limit = self.max_traces
        if self.on_retrace is not None:
            check_on_retrace(self.on_retrace, "filter_jit")
        if limit is not None and (type(limit) is not int or limit < 1):
            raise ValueError(
                f"`filter_jit(max_traces=...)` expects a whole number of at least 1, or `None` for "
                f"no limit; it got {limit!r}."
            )

    def __deepcopy__(self, memo: dict[int, Any]) -> "Policy":
        return self


def check_on_retrace(on_retrace: Any, function: str) -> None:
    """Raises `ValueError` unless `on_retrace` is valid; `function` is the name in the message."""
    is_word = isinstance(on_retrace, str) and on_retrace in ("warn", "error")
    if not is_word and not callable(on_retrace):
        raise ValueError(
            f"`{function}(on_retrace=...)` expects 'warn', 'error' or a function of one argument, "
            f"which is called with an `eqxlike.debug.Trace`; it got {on_retrace!r}."
        )


def react_to_trace(on_retrace: OnRetrace | None, trace: Trace) -> None:
    """Warns, raises, or calls the user's function, because a function is traced again."""
    if on_retrace == "warn":
        warnings.warn(str(trace), RetraceWarning, stacklevel=stacklevel_of_user())
    elif on_retrace == "error":
        raise RetraceError(
            f'{trace.place} must not be traced again (`on_retrace="error"`), but this would be '
            f"trace {trace.number}. {trace.explain()}",
            trace,
        )
    elif on_retrace is not None:
        # Operations in the user's function must not become part of the program that is being
        # traced.
        with jax.ensure_compile_time_eval():
            on_retrace(trace)


# --- The traces of one function ---


_MAX_TRACES = 32
"""Maximum number of traces that are kept. Older traces are forgotten."""

_MAX_DIFFERENCES = 100
"""Maximum number of differences that a trace keeps."""

_WEIGHTS = {"structure": 3, "static value": 2, "setting": 2}
"""The weights of differences in `_distance`; all other differences have weight 1."""

_serial = itertools.count()


@dataclasses.dataclass(eq=False)
class History:
    """The traces of one function with one set of options.

    The arguments of a trace are described only when another trace or a user needs the description.
    Arguments that could change before then are described at once.

    - `place`: the name of the function and the place of its definition.
    - `code`: the code object of the function, if it is written in Python.
    - `policy`: the reaction to a retrace.
    - `wrappers`: a value that is equal for functions that are wrapped in the same way.
    - `serial`: a number that identifies the function together with its options.
    """

    place: Place
    code: types.CodeType | None
    policy: Policy | None
    wrappers: Hashable = None
    serial: int = dataclasses.field(default_factory=lambda: next(_serial))

    def __post_init__(self) -> None:
        self._num_traces = 0
        self._kept: collections.deque[Trace] = collections.deque(maxlen=_MAX_TRACES)
        # The lock is reentrant because garbage collection, in a thread that holds the lock, may run
        # code that traces.
        self._lock = threading.RLock()

    @property
    def definition(self) -> Hashable:
        """A value that is equal for functions from the same lines, wrapped in the same way."""
        return self.code, self.wrappers

    @property
    def traces(self) -> tuple[Trace, ...]:
        with self._lock:
            found = tuple(self._kept)
        for trace in found:
            _ = trace.known  # Describe the arguments now: a user gets only text.
        return found

    def begin(self, known: Arguments | Callable[[], Arguments], owner: int) -> Trace:
        """Adds a trace and reports it. If a listener raises, the trace is removed again.

        **Arguments:**

        - `known`: a description of the arguments, or a function that makes it.
        - `owner`: a number that identifies the `CompiledFunction` of the trace.

        **Raises:** `RetraceError` if there are too many traces, or `on_retrace` is `"error"`.
        """
        limit = None if self.policy is None else self.policy.max_traces
        with self._lock:
            earlier = tuple(self._kept)
            trace = Trace(*self.place, self._num_traces + 1, known, owner, Clock())
            is_allowed = limit is None or self._num_traces < limit
            if is_allowed:
                self._num_traces += 1
                self._kept.append(trace)
        compare_traces(trace, earlier)
        if not is_allowed:
            times = "once" if limit == 1 else f"{limit} times"
            raise RetraceError(
                f"{self.place} may be traced {times} (`max_traces={limit}`), but this would be "
                f"trace {trace.number}. {trace.explain()}",
                trace,
            )
        try:
            if trace.number > 1 and self.policy is not None:
                react_to_trace(self.policy.on_retrace, trace)
            for listener in tuple(_listeners):
                _ = trace.known
                listener(trace, self)
        except BaseException:
            with self._lock, contextlib.suppress(ValueError):
                self._num_traces -= 1
                self._kept.remove(trace)
            raise
        return trace

    def forget(self, owner: int, num_traces: int) -> None:
        """Removes all `num_traces` traces of a `CompiledFunction` that has been dropped."""
        with self._lock:
            self._num_traces -= num_traces
            for trace in [each for each in self._kept if each.owner == owner]:
                self._kept.remove(trace)

    def emptied(self) -> "History":
        """A history of the same function, without traces."""
        return dataclasses.replace(self)


def compare_traces(trace: Trace, earlier: Iterable[Trace]) -> None:
    """Compares `trace` with the most similar of the `earlier` traces; if tied, with the latest."""
    found = [
        (tuple(itertools.islice(find_differences(each.known, trace.known), _MAX_DIFFERENCES)), each)
        for each in reversed(tuple(earlier))
    ]
    if found:
        trace.differences, nearest = min(found, key=lambda pair: _distance(*pair, trace))
        trace.compared_with = nearest.number


def _distance(differences: Iterable[TraceDifference], before: Trace, after: Trace) -> int:
    """The distance of two traces.

    If a part of the arguments has another structure, each array and static value in this part
    counts. Otherwise a call with another model would be closer than a call with other shapes.
    """
    total, parts = 0, ()
    for each in differences:
        weight = _WEIGHTS.get(each.what, 1)
        if each.what == "structure":
            parts = parts or (*before.arguments, *after.arguments)
            inside = sum(path.startswith((f"{each.path}.", f"{each.path}[")) for path in parts)
            weight = max(weight, inside)
        total += weight
    return total


def traces_compared_with(trace: Trace, earlier: Sequence[Trace], *, number: int) -> Trace:
    """A copy of `trace` with another number, compared with the traces of other functions.

    `earlier` are traces of functions defined at the same lines. If `earlier` is empty, the only
    difference is that this is another function.
    """
    again = dataclasses.replace(trace, number=number, compared_with=number - 1)
    if earlier:
        compare_traces(again, earlier)
    else:
        again.differences = (another_function(trace.function),)
    return again


def trace_of(function: Any, arguments: Mapping[str, Any], number: int) -> Trace:
    """A `Trace` of `function` for a dictionary of arguments. It belongs to no history."""
    flat = [flatten(value, by_identity=True) for value in arguments.values()]
    types = [jax.typeof(array) for arrays, _ in flat for array in arrays]
    structures = [structure for _, structure in flat]
    known = _describe(list(arguments), structures, types, _read_settings())
    return Trace(*place_of(function)[0], number, known, 0, Clock())


def place_of(function: Any) -> tuple[Place, types.CodeType | None]:
    """The place of a callable's definition, and its code object if it is written in Python."""
    try:
        unwrapped = inspect.unwrap(function)
    except ValueError:  # The `__wrapped__` attributes form a cycle.
        unwrapped = function
    if isinstance(getattr(unwrapped, "__self__", None), Module):
        unwrapped = unwrapped.__func__
    if not isinstance(unwrapped, types.FunctionType):
        name = getattr(function, "__qualname__", type(function).__name__)
        return Place(name, None, None), None
    code, name = unwrapped.__code__, unwrapped.__qualname__.rpartition("<locals>.")[2]
    file = show_place(code.co_filename, code.co_firstlineno).rpartition(":")[0]
    return Place(name, file, code.co_firstlineno), code


# --- Recording and reporting traces ---


Listener = Callable[[Trace, History], None]
"""A function that is called with each trace and with the history of the traced function."""

_listeners: list[Listener] = []


@contextlib.contextmanager
def listen_to_traces(listener: Listener) -> Iterator[None]:
    """Context manager that calls `listener` with every trace in any thread."""
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.remove(listener)


@dataclasses.dataclass(eq=False)
class Observer:
    """Records the traces of one `CompiledFunction`. It is used only during a trace.

    - `history`: the history to which traces are added.
    - `labels`, `structures`: the names of the arguments, and their Structures.
    - `drop`: a function that drops the compiled function.
    """

    history: History
    labels: list[str]
    structures: tuple[Structure, ...]
    drop: Callable[[], None]

    def __post_init__(self) -> None:
        self._serial = next(_serial)
        self._num_traces = 0

    def begin(self, arrays: Sequence[Any]) -> Trace | None:
        """Records the start of a trace. Returns `None` if JAX runs the function without tracing it.

        **Raises:** `RetraceError` if the trace is refused, and the exceptions of listeners.
        """
        if jax.config.jax_disable_jit:  # pyright: ignore[reportAttributeAccessIssue]
            return None
        types = tuple(map(jax.typeof, arrays))
        found = functools.partial(_describe, self.labels, self.structures, types, _read_settings())
        # Describe the arguments now if an object among them may change later, or if keeping a
        # Structure would keep a temporary function alive.
        may_wait = all(each.is_exact and each.anchor is None for each in self.structures)
        try:
            trace = self.history.begin(found if may_wait else found(), self._serial)
        except BaseException:
            # If there are earlier traces, keep the function with its compiled programs. A later
            # call with the refused arguments traces again, and is refused again.
            if self._num_traces == 0:
                self.drop()
            raise
        self._num_traces += 1
        return trace

    def fail(self) -> None:
        """Drops the compiled function and its traces after a failed trace."""
        # Drop the function, because JAX always takes its slow path for a function whose trace has
        # failed.
        self.drop()
        self.history.forget(self._serial, self._num_traces)
        self._num_traces = 0


def _describe(
    labels: list[str], structures: Sequence[Structure], types: Sequence[Any], settings: Settings
) -> Arguments:
    """Describes the arguments of a trace.

    **Arguments:**

    - `types`: the types of the arrays in the arguments.
    """
    names = ("<function>" if label == WRAPPER else label for label in labels)
    root = root_node(names, (describe(each, describe_static) for each in structures))
    return Arguments(Tree(root, tuple(map(form_of_type, types))), settings)


# fmt: off
_SETTINGS = (
    "jax_enable_x64", "jax_numpy_dtype_promotion", "jax_numpy_rank_promotion",
    "jax_default_matmul_precision", "jax_default_device", "jax_default_prng_impl",
    "jax_threefry_partitionable", "jax_random_seed_offset", "jax_debug_key_reuse", "jax_debug_nans",
    "jax_debug_infs", "jax_check_tracer_leaks", "jax_check_static_indices",
    "jax_softmax_custom_jvp", "jax_high_dynamic_range_gumbel", "jax_accurate_erf_inv",
    "jax_allow_f16_reductions", "jax_use_shardy_partitioner", "jax_use_direct_linearize",
    "jax_use_simplified_jaxpr_constants", "jax_embedded_constants_max_bytes",
    "jax_remove_size_one_mesh_axis_from_type", "jax_mutable_array_checks",
    "jax_error_checking_behavior_nan", "jax_error_checking_behavior_divide",
    "jax_error_checking_behavior_oob", "jax_explicit_x64_dtypes", "jax_legacy_prng_key",
    "jax_auto_pcast", "jax_enable_pgle", "jax_pgle_profiling_runs", "jax_xla_profile_version",
    "jax_no_execution", "eager_constant_folding", "check_vma",
)
# fmt: on
"""The settings of `jax.config` that cause a retrace. Some versions of JAX lack some settings."""


def _read_settings() -> Settings:
    """The current settings of JAX in this thread, and its mesh."""
    config = jax.config
    known = [(name, str(getattr(config, name))) for name in _SETTINGS if hasattr(config, name)]
    mesh: Any = jax.sharding.get_abstract_mesh()
    return _shared((*known, ("mesh", describe_mesh(mesh) if mesh.shape else "None")))


@functools.lru_cache(maxsize=8)
def _shared(settings: Settings) -> Settings:
    """Returns the same object for equal settings, to save memory."""
    return settings
