"""Traces as they happen: each is compared with earlier ones, and whoever wants to know is told."""

import contextlib
import itertools
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax

from ...._partition import Structure
from ...._traceback import stacklevel_of_user
from .._arguments import WRAPPER
from ._differences import Arguments
from ._history import History
from ._outline import form_of, outline_of, read_settings, root_outline
from ._trace import OnRetrace, RetraceError, RetraceWarning, Trace

Listener = Callable[[Trace, History], None]
"""Called with each trace, and the traces of the function."""

_listeners: tuple[Listener, ...] = ()
_lock = threading.Lock()
_serial = itertools.count()


class Observer:
    """Looks on while JAX traces one compiled function; a call that traces nothing does not meet it.

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

        **Raises:** `RetraceError` if it is refused, and whatever those raise who are told.
        """
        if jax.config.jax_disable_jit:  # pyright: ignore[reportAttributeAccessIssue]
            return None
        history = self._history
        outline = root_outline(self._labels, map(outline_of, self._structures))
        arguments = Arguments(outline, tuple(map(form_of, arrays)), read_settings())
        try:
            trace = history.begin(arguments, self._serial)
            tell(history, trace)
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


def tell(history: History, trace: Trace) -> None:
    """Tells all who want to know of a trace; what one of them raises refuses it."""
    try:
        if trace.number > 1 and history.policy is not None:
            react(history.policy.on_retrace, trace)
        for listener in _listeners:
            listener(trace, history)
    except BaseException:
        history.take_back(trace)
        raise


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


@contextlib.contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """Calls `listener` with every trace, in all threads, in the block."""
    global _listeners
    with _lock:
        _listeners = (*_listeners, listener)
    try:
        yield
    finally:
        with _lock:
            _listeners = tuple(each for each in _listeners if each is not listener)
