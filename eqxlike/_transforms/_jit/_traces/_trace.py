"""One trace of a compiled function."""

import time
from collections.abc import Callable, Iterable
from typing import Any, Literal, NamedTuple

from ._differences import Arguments, TraceDifference

_MOST_LISTED = 20
"""At most this many differences are in a message."""

_MOST_SHOWN = 4
"""At most this many arguments are in the `repr` of a trace."""


class Place(NamedTuple):
    """The name of a function, and the file and line where it is defined, if it is known."""

    name: str
    file: str | None
    line: int | None

    def __str__(self) -> str:
        return f"`{self.name}`" if self.file is None else f"`{self.name}` ({self.file}:{self.line})"


class Clock:
    """The time that one trace took; shared by all that tell of it."""

    def __init__(self) -> None:
        self.started_at = time.time()
        self.took_s: float | None = None
        self._started = time.perf_counter()

    def end(self) -> None:
        self.took_s = time.perf_counter() - self._started


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

    __slots__ = (
        "clock",
        "compared_with",
        "differences",
        "known",
        "number",
        "owner",
        "place",
    )

    def __init__(self, place: Place, number: int, known: Arguments, owner: int, clock: Clock):
        self.place = place
        self.known = known
        self.owner = owner
        self.clock = clock
        self.number = number
        self.compared_with: int | None = None
        self.differences: tuple[TraceDifference, ...] = ()

    @property
    def function(self) -> str:
        return self.place.name

    @property
    def file(self) -> str | None:
        return self.place.file

    @property
    def line(self) -> int | None:
        return self.place.line

    @property
    def started_at(self) -> float:
        return self.clock.started_at

    @property
    def took_s(self) -> float | None:
        return self.clock.took_s

    @property
    def arguments(self) -> dict[str, str]:
        """A text for each array and each static value, as in `{"x[0]": "float32[8,3]"}`."""
        return self.known.described()

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
                "else has changed: the caches were cleared, the function is mapped over axes of "
                "other names, or it is transformed in another way."
            )
        lines = [f"What differs from trace {self.compared_with}:"]
        lines += [f"  {each}" for each in self.differences[:_MOST_LISTED]]
        if len(self.differences) > _MOST_LISTED:
            lines.append(f"  and {len(self.differences) - _MOST_LISTED} more")
        return "\n".join([*lines, *_unique(each.advice for each in self.differences)])

    def __str__(self) -> str:
        if self.number == 1 and self.compared_with is None:
            return f"{self.place} is traced for the first time."
        return f"{self.place} is traced and compiled again (trace {self.number}). {self.explain()}"

    def __repr__(self) -> str:
        shown = [f"{path}: {text}" for path, text in self.arguments.items()]
        if len(shown) > _MOST_SHOWN:
            shown[_MOST_SHOWN:] = [f"and {len(shown) - _MOST_SHOWN} more"]
        return f"<trace {self.number} of {self.function}({', '.join(shown)})>"


def _unique(texts: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(texts))


# What a trace after the first leads to: a warning, an error, or whatever a callable does.


OnRetrace = Literal["warn", "error"] | Callable[[Trace], Any]
"""What `on_retrace` takes, beside `None`."""


class RetraceWarning(UserWarning):
    """A compiled function is traced again: see `filter_jit(on_retrace="warn")`."""


class RetraceError(RuntimeError):
    """A compiled function was to be traced again, or once too often.

    - `trace`: the trace that was refused.
    """

    def __init__(self, message: str, trace: Trace | None = None):
        super().__init__(message)
        self.trace = trace


class Policy:
    """The options `on_retrace` and `max_traces` of a compiled function.

    It is not copied: a deep copy of a function calls the same callable.

    **Raises:** `ValueError` or `TypeError` if they are none of what they may be.
    """

    __slots__ = ("max_traces", "on_retrace")

    def __init__(self, on_retrace: OnRetrace | None, max_traces: int | None):
        if on_retrace is not None:
            check_on_retrace(on_retrace, "filter_jit")
        if max_traces is not None and (type(max_traces) is not int or max_traces < 1):
            raise ValueError(
                f"`filter_jit(max_traces=...)` expects a whole number of at least 1, or `None` for "
                f"no limit; it got {max_traces!r}."
            )
        self.on_retrace: OnRetrace | None = on_retrace
        self.max_traces = max_traces

    @staticmethod
    def of(on_retrace: OnRetrace | None, max_traces: int | None) -> "Policy | None":
        """The policy with these options; `None` if there are none."""
        is_plain = on_retrace is None and max_traces is None
        return None if is_plain else Policy(on_retrace, max_traces)

    def __eq__(self, other: object) -> bool:
        return type(other) is Policy and (self.on_retrace, self.max_traces) == (
            other.on_retrace,
            other.max_traces,
        )

    def __hash__(self) -> int:
        # The callable need not be hashable.
        return hash(self.max_traces)

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
