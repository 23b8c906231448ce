"""JAX's warnings about unusable donated buffers, which are hidden while a call traces."""

import contextlib
import threading
import warnings
from collections.abc import Callable
from typing import Any

_UNUSED = "(?:Some donated buffers were not usable)"
"""The beginning of JAX's warning, as a regular expression. The group `(?:...)` makes it differ from
a filter that the user may have set for the same warning. `warnings` would otherwise treat the two
filters as one, and remove the user's filter.
"""


class _Filter:
    """Hides JAX's warning about unusable donated buffers, while at least one call needs this.

    All threads share one filter. `warnings.catch_warnings` would not work: if two threads use it at
    the same time, a filter may remain forever.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._num_users = 0
        self._filter: Any = None

    def begin(self) -> None:
        with self._lock:
            self._num_users += 1
            if self._num_users == 1:
                warnings.filterwarnings("ignore", message=_UNUSED)
                self._filter = warnings.filters[0]

    def end(self) -> None:
        with self._lock:
            self._num_users -= 1
            if self._num_users == 0 and self._filter in warnings.filters:
                warnings.filters.remove(self._filter)  # pyright: ignore[reportAttributeAccessIssue]


_filter = _Filter()


HIDES_WARNINGS = frozenset({"all", "all-except-first"})
"""The values of `donate` for which JAX's warnings are hidden."""


class DonationWarnings:
    """Context manager that hides JAX's warnings about unusable donated buffers of one function.

    JAX warns when it lowers the function. This happens after the trace and before the end of the
    call. So the end of a trace calls `silence`, and the end of the call calls `restore`.

    - `to_restore`: functions to call when the call returns or raises, from the last to the first.
    """

    def __init__(self) -> None:
        self.to_restore: list[Callable[[], None]] = []

    def silence(self) -> None:
        """Hides JAX's warnings until `restore` is called."""
        _filter.begin()
        self.to_restore.append(_filter.end)

    def __enter__(self) -> None: ...

    def __exit__(self, *exception: Any) -> None:
        self.restore()

    def restore(self) -> None:
        """Shows JAX's warnings again."""
        if self.to_restore:
            # Another thread may have popped the last function.
            with contextlib.suppress(IndexError):
                while True:
                    self.to_restore.pop()()
