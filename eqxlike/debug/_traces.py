"""Counts of the traces of a function, and an error when there are too many."""

import collections
import contextlib
import functools
import threading
import types
from collections.abc import Callable, Hashable, Iterator
from typing import Any, Literal, ParamSpec, TypeVar, overload

import jax.tree_util as jtu

from .. import field
from .._traceback import is_of_user
from ..extend import (
    MISSING,
    BoundMethod,
    History,
    Trace,
    Wrapper,
    check_on_retrace,
    compare_traces,
    listen_to_traces,
    react_to_trace,
    trace_of,
    traces_compared_with,
)
from ..extend import RetraceError as RetraceError
from ..extend import RetraceWarning as RetraceWarning
from ..extend import TraceDifference as TraceDifference
from ._nonfinite import arguments_by_name

Params = ParamSpec("Params")
Output = TypeVar("Output")


@overload
def assert_max_traces(
    *, max_traces: int | None
) -> Callable[[Callable[Params, Output]], Callable[Params, Output]]: ...
@overload
def assert_max_traces(
    fn: Callable[Params, Output], *, max_traces: int | None
) -> Callable[Params, Output]: ...
def assert_max_traces(fn: Callable[..., Any] = MISSING, *, max_traces: int | None) -> Any:
    """Wraps a function so that tracing it more than `max_traces` times is an error.

    Each call of the wrapper counts. Inside a jit it is called once for each trace: to be placed
    between the jit and the function.

    **Arguments:**

    - `fn`: any callable. Left out, this is a decorator with arguments.
    - `max_traces`: how many traces are allowed; `None` to count them only, for `get_num_traces`.

    **Returns:** a Module that is called like `fn` and has its arrays as leaves. Its copies count
    together with it, but for deep copies and those that were pickled, which count again.

    **Raises:** `TypeError` if `fn` is not callable; when called too often, `RuntimeError` saying
    which arguments have changed since the most similar of the earlier traces, and how.

    !!! example

        >>> import eqxlike as eqx, jax.numpy as jnp
        >>> @eqx.filter_jit
        ... @eqx.debug.assert_max_traces(max_traces=1)
        ... def double(x):
        ...     return 2 * x
        >>> print(double(jnp.arange(3)), double(jnp.ones(3, int)))
        [0 2 4] [2 2 2]
        >>> double(jnp.arange(4))
        Traceback (most recent call last):
        RuntimeError: `double` can only be traced 1 times, and this is trace 2. ...
          x: shape (3,) -> (4,)
        ...
    """
    if fn is MISSING:
        return functools.partial(assert_max_traces, max_traces=max_traces)
    if not callable(fn):
        raise TypeError(f"{fn!r} is not a callable object: `assert_max_traces` expects a function.")
    return _AssertMaxTraces(fn, max_traces, _Tag())


def get_num_traces(fn: Any) -> int:
    """The number of times that a function wrapped in `assert_max_traces` has been traced.

    **Arguments:**

    - `fn`: what `assert_max_traces` returned, or that inside other wrappers: jitted or otherwise
      transformed, bound to an instance, or with arguments bound to it by `functools.partial`.

    **Returns:** the number of traces, also those that ended in an error.

    **Raises:** `ValueError` if there is no such wrapper inside `fn`.

    !!! example

        >>> import eqxlike as eqx, jax.numpy as jnp
        >>> square = eqx.filter_jit(eqx.debug.assert_max_traces(lambda x: x**2, max_traces=None))
        >>> _ = square(jnp.ones(2)), square(jnp.zeros(2)), square(jnp.ones(3))
        >>> eqx.debug.get_num_traces(square)
        2
    """
    inner = fn
    while not isinstance(inner, _AssertMaxTraces):
        if isinstance(inner, functools.partial):
            inner = inner.func
        elif isinstance(inner, types.MethodType):
            inner = inner.__func__
        elif hasattr(inner, "__wrapped__"):
            inner = inner.__wrapped__
        else:
            raise ValueError(
                f"{fn!r} does not appear to be wrapped with `eqxlike.debug.assert_max_traces`, "
                "which counts the traces."
            )
    return inner.tag.num_traces


_MAX_CALLS = 16
"""At most this many calls are remembered: a mistake that has a function traced again does so at
each call, and the latest show all there is.
"""

_lock = threading.Lock()


class _Tag:
    """The traces of one function so far; shared by all copies of a wrapper.

    A deep copy or one that was pickled is another, and so starts to count again.
    """

    __slots__ = ("__weakref__", "num_traces", "traces")

    def __init__(self):
        self.num_traces = 0
        self.traces: collections.deque[Trace] = collections.deque(maxlen=_MAX_CALLS)

    def __reduce__(self) -> Any:
        return _Tag, ()


class _AssertMaxTraces(Wrapper):
    """The wrapper that `assert_max_traces` returns."""

    fn: Callable[..., Any]
    max_traces: int | None = field(static=True)
    tag: _Tag = field(static=True)

    @property
    def __wrapped__(self) -> Any:
        return self.fn

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        with _lock:
            self.tag.num_traces += 1
            number = self.tag.num_traces
        if (limit := self.max_traces) is not None:
            own = self.fn.__self__ if isinstance(self.fn, BoundMethod) else self.fn
            named = {} if jtu.all_leaves([own]) else {"self": own}
            named |= arguments_by_name(self.fn, args, kwargs)[0]
            trace = trace_of(self.fn, named, number)
            if number > limit:
                earlier = self.tag.traces.copy()
                compare_traces(trace, earlier)
                raise RuntimeError(
                    f"`{trace.function}` can only be traced {limit} times, and this is trace "
                    f"{number}. {trace.explain() if earlier else 'No trace was allowed.'}"
                )
            self.tag.traces.append(trace)
        return self.fn(*args, **kwargs)


# --- Why there was another trace, in a block ---


_MAX_TRACES = 1000
"""At most this many traces are in the list, the latest."""


@contextlib.contextmanager
def explain_retraces(
    on_retrace: Literal["warn", "error"] | Callable[[Trace], Any] = print,
) -> Iterator[list[Trace]]:
    """A block in which each function of `filter_jit` says why it is traced and compiled again.

    Every trace after the first of a function is reported, also where the first came before the
    block. So is the first trace of a function that is defined by the same lines as another one that
    was traced in the block: `filter_jit(lambda x: ...)` in a loop compiles in each turn.

    The block is one for all threads. Calls that trace nothing cost what they always do.

    **Arguments:**

    - `on_retrace`: a function that is called with each such trace, `print` if left out; `"warn"` to
      warn, with the line of the call; `"error"` to raise.

    **Returns:** a context manager, which gives the list of these traces, the latest 1000 of them.

    **Raises:** `ValueError` for another `on_retrace`; in the block, `RetraceError` from the
    call that traces again, with `"error"`.

    !!! example

        >>> import eqxlike as eqx, jax.numpy as jnp
        >>> @eqx.filter_jit
        ... def mean(batch):
        ...     return batch["x"].mean()
        >>> with eqx.debug.explain_retraces() as retraces:
        ...     for size in (32, 32, 8):
        ...         _ = mean({"x": jnp.ones((size, 3))})
        `mean` (...) is traced and compiled again (trace 2). What differs from trace 1:
          batch['x']: shape (32, 3) -> (8, 3)
        A function is compiled for each shape. ...
        >>> retraces[0].differences[0].path
        "batch['x']"
    """
    check_on_retrace(on_retrace, "explain_retraces")
    retraces: list[Trace] = []
    # The latest traces of the functions from the same lines, and which of these it was.
    seen: dict[Hashable, collections.deque[tuple[Trace, int]]] = {}

    def listen(trace: Trace, history: History) -> None:
        reported = trace if trace.number > 1 else None
        # What this package defines it makes again for each function that it is given.
        if history.code is not None and is_of_user(history.code.co_filename):
            earlier = seen.setdefault(history.definition, collections.deque(maxlen=_MAX_CALLS))
            if reported is None and earlier:
                own = [each for each, serial in earlier if serial == history.serial]
                reported = traces_compared_with(trace, own, number=earlier[-1][0].number + 1)
            earlier.append((reported or trace, history.serial))
        if reported is not None:
            retraces.append(reported)
            del retraces[:-_MAX_TRACES]
            react_to_trace(on_retrace, reported)

    with listen_to_traces(listen):
        yield retraces
