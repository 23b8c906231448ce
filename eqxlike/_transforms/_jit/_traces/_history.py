"""The traces of one function: each is compared with earlier ones, and reported to listeners."""

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

from ...._module import Module
from ...._partition import Structure, Tree, describe, flatten, root_node
from ...._traceback import stacklevel_of_user
from .._arguments import WRAPPER
from ._differences import (
    Arguments,
    Settings,
    TraceDifference,
    another_function,
    describe_mesh,
    find_differences,
    form_of_type,
)
from ._statics import describe_static, show_place

_MAX_LISTED = 20
"""At most this many differences are in a message."""

_MAX_SHOWN = 4
"""At most this many arguments are in the `repr` of a trace."""


class Place(NamedTuple):
    """The name of a function, and the file and line where it is defined, if it is known."""

    name: str
    file: str | None
    line: int | None

    def __str__(self) -> str:
        return f"`{self.name}`" if self.file is None else f"`{self.name}` ({self.file}:{self.line})"


class Clock:
    """The time that one trace took; shared by all `Trace`s of it."""

    def __init__(self) -> None:
        self.started_at = time.time()
        self.took_s: float | None = None
        self._started = time.perf_counter()

    def end(self) -> None:
        self.took_s = time.perf_counter() - self._started


@dataclasses.dataclass(eq=False, repr=False, slots=True)
class Trace:
    """One trace of a compiled function; its `str` says which, and what differs from an earlier one.

    It holds texts, and neither arrays nor anything else that the function was called with.

    - `function`, `file`, `line`: the name of the function, and where it is defined; `None` for file
      and line of what is not written in Python.
    - `number`: the number of the trace, from 1.
    - `compared_with`: the number of the earlier trace that is most like it; `None` for the first.
    - `differences`: what differs from that, each a `TraceDifference`; at most 100.
    - `started_at`: when it began, in seconds as `time.time()` counts them.
    - `took_s`: how long JAX traced, in seconds, with functions that it traced inside; without
      lowering and compiling. `None` while it is traced, and if it was refused.
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
        """What was known of the arguments; made on first use if that may wait, see `History`."""
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
        """A text for each array and each static value, as in `{"x[0]": "float32[8, 3]"}`."""
        return {path: str(leaf) for path, leaf in self.known.tree.leaves()}

    @property
    def settings(self) -> dict[str, str]:
        """JAX's settings on which a trace depends, as text by name."""
        return dict(self.known.settings)

    def explain(self) -> str:
        """The differences, a line each, and what to do about them."""
        if self.compared_with is None:
            return "The earlier ones are no longer known."
        if not self.differences:
            return (
                f"Arguments and settings are those of trace {self.compared_with}, so something "
                "else has changed: the caches were cleared, or the function is mapped over axes of "
                "other names, transformed in another way, or jitted again for each call."
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


# --- What a trace after the first leads to: a warning, an error, or whatever a callable does ---


OnRetrace = Literal["warn", "error"] | Callable[[Trace], Any]
"""What `on_retrace` takes, besides `None`."""


class RetraceWarning(UserWarning):
    """A compiled function is traced again: see `filter_jit(on_retrace="warn")`."""


class RetraceError(RuntimeError):
    """A compiled function was to be traced again, or once too often.

    - `trace`: the trace that was refused.
    """

    def __init__(self, message: str, trace: Trace | None = None):
        super().__init__(message)
        self.trace = trace


@dataclasses.dataclass(frozen=True, slots=True)
class Policy:
    """The options `on_retrace` and `max_traces` of a compiled function.

    It is not copied: a deep copy of a function calls the same callable.

    **Raises:** `ValueError` or `TypeError` for other values.
    """

    # The callable need not be hashable.
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
    """Raises `ValueError` unless `function` may be called with this `on_retrace`."""
    is_word = isinstance(on_retrace, str) and on_retrace in ("warn", "error")
    if not is_word and not callable(on_retrace):
        raise ValueError(
            f"`{function}(on_retrace=...)` expects 'warn', 'error' or a function of one argument, "
            f"which is called with an `eqxlike.debug.Trace`; it got {on_retrace!r}."
        )


def react(on_retrace: OnRetrace | None, trace: Trace) -> None:
    """Does what `on_retrace` says about a trace after the first."""
    if on_retrace == "warn":
        warnings.warn(str(trace), RetraceWarning, stacklevel=stacklevel_of_user())
    elif on_retrace == "error":
        raise RetraceError(
            f'{trace.place} must not be traced again (`on_retrace="error"`), and this would be '
            f"trace {trace.number}. {trace.explain()}",
            trace,
        )
    elif on_retrace is not None:
        # What it computes is no part of the program that is traced.
        with jax.ensure_compile_time_eval():
            on_retrace(trace)


# --- The traces of one function ---


_MAX_TRACES = 32
"""At most this many traces are kept, the latest."""

_MAX_DIFFERENCES = 100
"""At most this many differences are kept for a trace."""

_WEIGHTS = {"structure": 3, "static value": 2, "setting": 2}
"""How much less alike a difference makes two traces than one in the form of an array."""

_serial = itertools.count()


class History:
    """The traces of one function with one set of options.

    A first trace is compared with none: what it was for is put into words when there is another, or
    when somebody looks. At once, if it could change before.

    **Arguments:**

    - `place`: where the function is defined.
    - `code`: its code, if it is written in Python.
    - `policy`: what a further trace leads to.
    - `definition`: the same for a function of the same code that is wrapped in the same way.

    Its `serial` is a number for the function, with its options.
    """

    def __init__(
        self,
        place: Place,
        code: types.CodeType | None,
        policy: Policy | None,
        definition: Hashable = None,
    ):
        self.place = place
        self.code = code
        self.definition = (code, definition)
        self.serial = next(_serial)
        self.policy = policy
        self._num_traces = 0
        self._kept: collections.deque[Trace] = collections.deque(maxlen=_MAX_TRACES)
        # Garbage collection may run code that traces, in the thread that holds the lock.
        self._lock = threading.RLock()

    @property
    def traces(self) -> tuple[Trace, ...]:
        with self._lock:
            found = tuple(self._kept)
        for trace in found:
            _ = trace.known  # It goes to a user, and so holds texts alone from now on.
        return found

    def begin(self, known: Arguments | Callable[[], Arguments], owner: int) -> Trace:
        """Adds a trace, and reports it; what a listener raises refuses it.

        **Arguments:**

        - `known`: what is known of the arguments, or a function that puts it into words.
        - `owner`: a number for the compiled function to which the trace belongs.

        **Raises:** `RetraceError` if there are too many.
        """
        limit = None if self.policy is None else self.policy.max_traces
        with self._lock:
            earlier = tuple(self._kept)
            trace = Trace(*self.place, self._num_traces + 1, known, owner, Clock())
            is_allowed = limit is None or self._num_traces < limit
            if is_allowed:
                self._num_traces += 1
                self._kept.append(trace)
        compare(trace, earlier)
        if not is_allowed:
            times = "once" if limit == 1 else f"{limit} times"
            raise RetraceError(
                f"{self.place} may be traced {times} (`max_traces={limit}`), and this would be "
                f"trace {trace.number}. {trace.explain()}",
                trace,
            )
        try:
            if trace.number > 1 and self.policy is not None:
                react(self.policy.on_retrace, trace)
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
        """Forgets the `num_traces` traces of a compiled function that is no longer there."""
        with self._lock:
            self._num_traces -= num_traces
            for trace in [each for each in self._kept if each.owner == owner]:
                self._kept.remove(trace)

    def emptied(self) -> "History":
        """A history of the same function, without traces."""
        history = History(self.place, self.code, self.policy, self.definition[1])
        history.serial = self.serial
        return history


def compare(trace: Trace, earlier: Iterable[Trace]) -> None:
    """Puts into `trace` what differs from the most similar of `earlier` ones, the latest such."""
    found = [
        (tuple(itertools.islice(find_differences(each.known, trace.known), _MAX_DIFFERENCES)), each)
        for each in reversed(tuple(earlier))
    ]
    if found:
        trace.differences, nearest = min(found, key=lambda pair: _distance(*pair, trace))
        trace.compared_with = nearest.number


def _distance(differences: Iterable[TraceDifference], before: Trace, after: Trace) -> int:
    """How little alike two traces are. A part of another structure counts with all that is in it:
    else the call with another model would be nearer than one with other shapes.
    """
    total, parts = 0, ()
    for each in differences:
        least = _WEIGHTS.get(each.what, 1)
        if each.what == "structure":
            parts = parts or (*before.arguments, *after.arguments)
            inside = sum(path.startswith((f"{each.path}.", f"{each.path}[")) for path in parts)
            least = max(least, inside)
        total += least
    return total


def compared_with(trace: Trace, earlier: Sequence[Trace], *, number: int) -> Trace:
    """`trace` again, as number `number`, after `earlier` ones of functions from the same lines; of
    this function none if `earlier` is empty.
    """
    again = dataclasses.replace(trace, number=number, compared_with=number - 1)
    if earlier:
        compare(again, earlier)
    else:
        again.differences = (another_function(trace.function),)
    return again


def trace_of(function: Any, arguments: Mapping[str, Any], number: int) -> Trace:
    """A trace of `function` for these arguments, by name, which belongs to no history."""
    flat = [flatten(value, by_identity=True) for value in arguments.values()]
    types = [jax.typeof(array) for arrays, _ in flat for array in arrays]
    structures = [structure for _, structure in flat]
    known = _describe(list(arguments), structures, types, _read_settings())
    return Trace(*place_of(function)[0], number, known, 0, Clock())


def place_of(function: Any) -> tuple[Place, types.CodeType | None]:
    """Where a callable is defined, and its code, as far as it has any."""
    try:
        unwrapped = inspect.unwrap(function)
    except ValueError:  # It wraps itself.
        unwrapped = function
    if isinstance(getattr(unwrapped, "__self__", None), Module):
        unwrapped = unwrapped.__func__
    code = getattr(unwrapped, "__code__", None)
    if not isinstance(unwrapped, types.FunctionType) or code is None:
        name = getattr(function, "__qualname__", type(function).__name__)
        return Place(name, None, None), None
    name = unwrapped.__qualname__.rpartition("<locals>.")[2]
    file = show_place(code.co_filename, code.co_firstlineno).rpartition(":")[0]
    return Place(name, file, code.co_firstlineno), code


# --- Traces as they happen ---


Listener = Callable[[Trace, History], None]
"""Called with each trace, and the traces of the function."""

_listeners: list[Listener] = []


@contextlib.contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """Calls `listener` with every trace, in all threads, in the block."""
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.remove(listener)


class Observer:
    """Observes the traces of one compiled function; a call that traces nothing does not meet it.

    **Arguments:**

    - `history`: the traces of the function.
    - `labels`, `structures`: the names of its arguments, and their Structures.
    - `drop`: a function that drops the compiled function.
    """

    def __init__(
        self,
        history: History,
        labels: list[str],
        structures: tuple[Structure, ...],
        drop: Callable[[], None],
    ):
        self._history = history
        self._labels = ["<function>" if label == WRAPPER else label for label in labels]
        self._structures = structures
        self._drop = drop
        self._serial = next(_serial)
        self._num_traces = 0

    def begin(self, arrays: Sequence[Any]) -> Trace | None:
        """A trace begins; `None` if JAX runs the function without tracing it.

        **Raises:** `RetraceError` if it is refused, and whatever listeners raise.
        """
        if jax.config.jax_disable_jit:  # pyright: ignore[reportAttributeAccessIssue]
            return None
        types = tuple(map(jax.typeof, arrays))
        found = functools.partial(
            _describe, self._labels, self._structures, types, _read_settings()
        )
        # An object that was passed may change, and a short-lived function goes with its Structure.
        may_wait = all(each.is_exact and each.anchor is None for each in self._structures)
        try:
            trace = self._history.begin(found if may_wait else found(), self._serial)
        except BaseException:
            # The function goes on with what is compiled. JAX will trace for these arguments again,
            # to be refused again.
            if self._num_traces == 0:
                self._drop()
            raise
        self._num_traces += 1
        return trace

    def fail(self) -> None:
        """A trace has failed: the compiled function goes, and what it was traced for."""
        # JAX takes its slow path for good where a trace has failed.
        self._drop()
        self._history.forget(self._serial, self._num_traces)
        self._num_traces = 0


def _describe(
    labels: list[str], structures: Sequence[Structure], types: Sequence[Any], settings: Settings
) -> Arguments:
    """What was known of the arguments, in words.

    **Arguments:**

    - `types`: JAX's types of their arrays.
    """
    root = root_node(labels, (describe(each, describe_static) for each in structures))
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
"""Found by changing each of `jax.config.values` between two calls. Not all are in all versions."""


def _read_settings() -> Settings:
    """The settings as they are in this thread, and the mesh, if any."""
    config = jax.config
    known = [(name, str(getattr(config, name))) for name in _SETTINGS if hasattr(config, name)]
    mesh: Any = jax.sharding.get_abstract_mesh()
    return _shared((*known, ("mesh", describe_mesh(mesh) if mesh.shape else "None")))


@functools.lru_cache(maxsize=8)
def _shared(settings: Settings) -> Settings:
    """The first of equal settings: most traces have the same."""
    return settings
