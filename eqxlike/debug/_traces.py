"""Counts of the traces of a function, and an error when there are too many."""

import collections
import functools
import threading
import types
import weakref
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar, overload

from .._missing import MISSING
from .._module import Wrapper, bind, field
from ._call import Call, describe_call, describe_changes

Params = ParamSpec("Params")
Output = TypeVar("Output")

_MOST_CALLS = 16
"""At most this many calls are remembered: a mistake that has a function traced anew does so at each
call, and the latest say all there is.
"""

_MOST_CHANGES = 20
"""At most this many changes are listed."""


class _Tag:
    """Says which traces belong together; carried along by all copies of a wrapper.

    It has no attributes, so that `filter_jit` takes it for the same from one call to the next. A
    deep copy or one that was pickled is another, and so starts to count anew.
    """

    __slots__ = ("__weakref__",)


class _History:
    """The traces of one function so far."""

    def __init__(self):
        self.num_traces = 0
        self.calls: collections.deque[tuple[int, Call]] = collections.deque(maxlen=_MOST_CALLS)


_histories: weakref.WeakKeyDictionary[_Tag, _History] = weakref.WeakKeyDictionary()
_lock = threading.Lock()


class _AssertMaxTraces(Wrapper):
    """The wrapper that `assert_max_traces` returns."""

    fn: Callable[..., Any]
    max_traces: int | None = field(static=True)
    tag: _Tag = field(static=True)

    @property
    def __wrapped__(self) -> Any:
        return self.fn

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        call = {} if self.max_traces is None else describe_call(self.fn, args, kwargs)
        with _lock:
            history = _histories.setdefault(self.tag, _History())
            history.num_traces += 1
            number, earlier = history.num_traces, list(history.calls)
            is_allowed = self.max_traces is None or number <= self.max_traces
            if self.max_traces is not None and is_allowed:
                history.calls.append((number, call))
        if not is_allowed:
            name = getattr(self.fn, "__qualname__", type(self.fn).__name__)
            raise RuntimeError(
                f"`{name}` can only be traced {self.max_traces} times, and this is trace "
                f"{number}. {_explain(earlier, call)}"
            )
        return self.fn(*args, **kwargs)

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return self if instance is None else bind(self, instance)


def _explain(earlier: list[tuple[int, Call]], call: Call) -> str:
    """A text on what is new about `call`, beside the one of the `earlier` ones most like it."""
    if not earlier:
        return "No trace was allowed."
    changes, number = min(
        ((describe_changes(before, call), number) for number, before in earlier),
        key=lambda candidate: (len(candidate[0]), -candidate[1]),
    )
    if changes:
        lines = [f"What differs from trace {number}:", *changes[:_MOST_CHANGES]]
        if len(changes) > _MOST_CHANGES:
            lines.append(f"and {len(changes) - _MOST_CHANGES} more")
        return "\n  ".join(lines)
    return (
        f"Its arguments are like those of trace {number} in structure, shapes, dtypes and static "
        "values, so something else has changed: it may be jitted anew for each call (apply the jit "
        "once, outside the loop), transformed in another way, run under other JAX settings, or its "
        "caches were cleared."
    )


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
    together with it, but for deep copies and those that were pickled, which count anew.

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
          x: i32[3] then i32[4]
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
    with _lock:
        history = _histories.get(inner.tag)
        return 0 if history is None else history.num_traces
