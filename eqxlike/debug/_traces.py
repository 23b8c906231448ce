"""Counts the traces of a function, raises if there are too many, and reports retraces."""

import collections
import contextlib
import functools
import threading
import types
from collections.abc import Callable, Hashable, Iterator
from typing import Any, Literal, ParamSpec, TypeVar, overload

import jax.tree_util as jtu

from .. import extend, field
from .._traceback import is_of_user
from ..extend import MISSING, BoundMethod, History, Trace, Wrapper
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
    """Wraps a function so that an error is raised if it is traced more than `max_traces` times.

    Wrap the function first, and then jit the wrapper. Each call of the wrapper counts as a trace,
    because a jitted function calls the wrapper only to trace it.

    **Arguments:**

    - `fn`: any callable. If it is left out, the result is a decorator.
    - `max_traces`: the largest number of traces. With `None` there is no limit, and traces are only
      counted, for `get_num_traces`.

    **Returns:** a Module with the signature of `fn`. Its leaves are the arrays of `fn`. All copies
    of the Module share one count, but deep copies and unpickled copies start to count from zero.

    **Raises:** `TypeError` if `fn` is not callable. `RuntimeError` if `fn` is traced too often. The
    message of this error has the differences from the most similar earlier trace.

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

    - `fn`: the result of `assert_max_traces`, or a wrapper around it: a transformed function, a
      bound method, or a `functools.partial`.

    **Returns:** the number of traces, including traces that raised an error.

    **Raises:** `ValueError` if `fn` does not contain a result of `assert_max_traces`.

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
"""The number of traces that are kept for comparison. The latest traces are enough, because a
mistake that causes one retrace usually causes a retrace in each call.
"""

_lock = threading.Lock()


class _Tag:
    """The traces of one function. All copies of a wrapper share one tag.

    A deep copy or an unpickled copy gets a new tag, and starts to count from zero.
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
            trace = extend.trace_of(self.fn, named, number)
            if number > limit:
                earlier = self.tag.traces.copy()
                extend.compare_traces(trace, earlier)
                raise RuntimeError(
                    f"`{trace.function}` can only be traced {limit} times, and this is trace "
                    f"{number}. {trace.explain() if earlier else 'No trace was allowed.'}"
                )
            self.tag.traces.append(trace)
        return self.fn(*args, **kwargs)


# --- Reports of the reasons for retraces in a `with` block ---


_MAX_TRACES = 1000
"""The list of retraces has at most this many items. Older retraces are dropped."""


@contextlib.contextmanager
def explain_retraces(
    on_retrace: Literal["warn", "error"] | Callable[[Trace], Any] = print,
) -> Iterator[list[Trace]]:
    """Context manager that reports why functions of `filter_jit` are traced and compiled again.

    It reports every trace of a function except the first trace, which may have come before the
    block. If two functions have the same source lines, it also reports the first trace of the
    second function. So it finds a `filter_jit(lambda x: ...)` in a loop. Such a loop makes and
    compiles a new function in each iteration.

    Traces in all threads are reported. Calls that do not trace are not slower.

    **Arguments:**

    - `on_retrace`: a function that is called with each retrace (by default, `print`); `"warn"` for
      a warning at the line of the call; or `"error"` for an exception.

    **Returns:** a context manager. `with explain_retraces() as retraces` gives a list of the latest
    1000 retraces.

    **Raises:** `ValueError` if `on_retrace` is invalid. With `"error"`, a call in the block that
    traces again raises `RetraceError`.

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
    extend.check_on_retrace(on_retrace, "explain_retraces")
    retraces: list[Trace] = []
    # The keys identify the source lines of functions. The values are the latest traces of the
    # functions at these lines, each with the serial number of its function.
    seen: dict[Hashable, collections.deque[tuple[Trace, int]]] = {}

    def listen(trace: Trace, history: History) -> None:
        reported = trace if trace.number > 1 else None
        # Leave out functions that this package defines, because the package defines such functions
        # again for each user function.
        if history.code is not None and is_of_user(history.code.co_filename):
            earlier = seen.setdefault(history.definition, collections.deque(maxlen=_MAX_CALLS))
            if reported is None and earlier:
                own = [each for each, serial in earlier if serial == history.serial]
                reported = extend.traces_compared_with(trace, own, number=earlier[-1][0].number + 1)
            earlier.append((reported or trace, history.serial))
        if reported is not None:
            retraces.append(reported)
            del retraces[:-_MAX_TRACES]
            extend.react_to_trace(on_retrace, reported)

    with extend.listen_to_traces(listen):
        yield retraces
