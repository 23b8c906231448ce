"""The traces of one function."""

import collections
import contextlib
import inspect
import itertools
import threading
import types
from collections.abc import Hashable
from typing import Any

from ._differences import (
    Arguments,
    TraceDifference,
    definition_difference,
    find_differences,
)
from ._outline import show_place
from ._trace import Clock, Place, Policy, RetraceError, Trace

_MOST_TRACES = 32
"""At most this many traces are kept, the latest."""

_MOST_DIFFERENCES = 100
"""At most this many differences are kept for a trace."""

_WEIGHTS = {"structure": 3, "static value": 2, "setting": 2}
"""How much less alike a difference makes two traces than one in the form of an array."""

_serial = itertools.count()


class History:
    """The traces of one function with one set of options.

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
        self._kept: collections.deque[Trace] = collections.deque(maxlen=_MOST_TRACES)
        # Garbage collection may run code that traces, in the thread that holds the lock.
        self._lock = threading.RLock()

    @property
    def traces(self) -> tuple[Trace, ...]:
        with self._lock:
            return tuple(self._kept)

    def begin(self, arguments: Arguments, owner: int) -> Trace:
        """Adds a trace; raises `RetraceError` if there are too many.

        **Arguments:**

        - `owner`: a number for the compiled function to which the trace belongs.
        """
        limit = None if self.policy is None else self.policy.max_traces
        with self._lock:
            earlier = tuple(self._kept)
            if earlier and earlier[-1].known.settings == arguments.settings:
                arguments = arguments._replace(settings=earlier[-1].known.settings)
            trace = Trace(self.place, self._num_traces + 1, arguments, owner, Clock())
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
        return trace

    def take_back(self, trace: Trace) -> None:
        """Forgets a trace that was refused."""
        with self._lock:
            self._num_traces -= 1
            with contextlib.suppress(ValueError):
                self._kept.remove(trace)

    def forget(self, owner: int, num_traces: int) -> None:
        """Forgets the traces of a compiled function that is no longer there, so many of them."""
        with self._lock:
            self._num_traces -= num_traces
            for trace in [each for each in self._kept if each.owner == owner]:
                self._kept.remove(trace)

    def emptied(self) -> "History":
        """A history of the same function, without traces."""
        history = History(self.place, self.code, self.policy, self.definition[1])
        history.serial = self.serial
        return history


def compare(trace: Trace, earlier: tuple[Trace, ...]) -> None:
    """Puts into `trace` what differs from the most similar of `earlier` ones, the latest such."""
    nearest: Trace | None = None
    differences: list[TraceDifference] = []
    least = _MOST_DIFFERENCES
    for candidate in reversed(earlier):
        # As many as there are in the best one cannot be better.
        found = find_differences(candidate.known, trace.known)
        those = list(itertools.islice(found, min(least, _MOST_DIFFERENCES)))
        distance = sum(_WEIGHTS.get(each.what, 1) for each in those)
        if nearest is None or distance < least:
            nearest, differences, least = candidate, those, distance
    if nearest is not None:
        trace.compared_with = nearest.number
        trace.differences = tuple(differences)


def compared_with(trace: Trace, earlier: Trace, *, is_same_function: bool) -> Trace:
    """`trace` again, as one after a trace of a function from the same lines."""
    told = Trace(trace.place, earlier.number + 1, trace.known, trace.owner, trace.clock)
    if is_same_function:
        compare(told, (earlier,))
    else:
        told.compared_with = earlier.number
        told.differences = (definition_difference(trace.function),)
    return told


def place_of(function: Any) -> tuple[Place, types.CodeType | None]:
    """Where a callable is defined, and its code, as far as it has any."""
    try:
        unwrapped = inspect.unwrap(function)
    except ValueError:  # It wraps itself.
        unwrapped = function
    code = getattr(unwrapped, "__code__", None)
    if not isinstance(unwrapped, types.FunctionType) or code is None:
        name = getattr(function, "__qualname__", type(function).__name__)
        return Place(name, None, None), None
    name = unwrapped.__qualname__.rpartition("<locals>.")[2]
    file = show_place(code.co_filename, code.co_firstlineno).rpartition(":")[0]
    return Place(name, file, code.co_firstlineno), code
