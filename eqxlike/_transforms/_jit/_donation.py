"""The arguments whose buffers are donated, by five words or by names, and warnings about them.

Whether two arguments share a buffer, as views or as one array, is left to JAX; `_filter_jit` adds
the paths to its error.
"""

import contextlib
import threading
import warnings
from collections.abc import Callable, Iterable
from typing import Any, get_args

from .._signatures import DonateWord
from ._arguments import ArgumentOrder

Donate = DonateWord | str | tuple[str, ...]

_WORDS = get_args(DonateWord)


def check_donate(donate: Donate | Iterable[str], order: ArgumentOrder) -> Donate:
    """`donate` as a word or a tuple of names of parameters of the function.

    **Raises:** `ValueError` for any other word, or a name that is not a parameter.
    """
    if donate in _WORDS:
        return donate  # pyright: ignore
    donate_names = (donate,) if isinstance(donate, str) else tuple(donate)
    if unknown := order.unknown_among(donate_names):
        raise ValueError(
            f"`filter_jit(..., donate=...)` must be one of {', '.join(map(repr, _WORDS))}, or "
            f"names of parameters of the function. {unknown}"
        )
    return donate_names


_UNUSED = "(?:Some donated buffers were not usable)"
"""The beginning of JAX's warning. In brackets, since `warnings` takes an equal filter of the user's
for this one, and would move and remove that.
"""


class _Filter:
    """A filter that hides JAX's warning of unusable donated buffers, while somebody asks for it.

    There is one filter for all threads: `warnings.catch_warnings` in two of them, the one ending in
    the middle of the other, would leave its filter behind for good.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._num_asking = 0
        self._filter: Any = None

    def begin(self) -> None:
        with self._lock:
            self._num_asking += 1
            if self._num_asking == 1:
                warnings.filterwarnings("ignore", message=_UNUSED)
                self._filter = warnings.filters[0]

    def end(self) -> None:
        with self._lock:
            self._num_asking -= 1
            if self._num_asking == 0 and self._filter in warnings.filters:
                warnings.filters.remove(self._filter)  # pyright: ignore[reportAttributeAccessIssue]


_filter = _Filter()


class DonationWarnings:
    """A switch for JAX's warnings of unusable donated buffers of one function.

    JAX warns when it lowers, which is after the trace and before the call has ended. A call
    that may trace runs inside this, a context that ends with `restore`.

    - `to_restore`: functions to call, last one first, when a call that may have traced has ended,
      well or not; `None` if the user wants to be warned.
    """

    def __init__(self, donate: Donate):
        is_silent = donate in ("all", "all-except-first")
        self.to_restore: list[Callable[[], None]] | None = [] if is_silent else None

    def silence(self) -> None:
        """Hides these warnings, if the user wants none, until `restore`."""
        if self.to_restore is not None:
            _filter.begin()
            self.to_restore.append(_filter.end)

    def __enter__(self) -> None: ...

    def __exit__(self, *exception: Any) -> None:
        self.restore()

    def restore(self) -> None:
        """Shows them again."""
        if self.to_restore:
            # Another thread may take the last of them.
            with contextlib.suppress(IndexError):
                while True:
                    self.to_restore.pop()()


def donated_places(
    donate: Donate, order: ArgumentOrder, num_bound: int, names: tuple[str, ...], num_args: int
) -> tuple[int, ...]:
    """The places in an ordered call whose arrays are donated.

    **Arguments:**

    - `num_bound`: the number of places at the front that are bound to what was wrapped, such as a
      Module that is called. As in Equinox, "first" means the first argument after these.
    - `names`, `num_args`: the names and the number of arguments of the ordered call.
    """
    if isinstance(donate, tuple):
        return tuple(place for name in donate for place in order.places(name, names, num_args))
    if donate == "none":
        return ()
    spared = num_bound if donate.endswith("-except-first") else None
    return tuple(place for place in range(num_args) if place != spared)
