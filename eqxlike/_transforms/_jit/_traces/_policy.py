"""What a trace after the first leads to: a warning, an error, or whatever a callable does."""

from collections.abc import Callable
from typing import Any, Literal

from ._trace import Trace

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
