"""The exceptions of `error_if`, and how they reach the caller of a compiled program.

A failed check raises in a callback, in the middle of the program. When the caller waits for the
result, JAX raises a different exception, with pages of text. This text contains a number that
identifies the failure. With this number, the original message is found even if several threads fail
at the same time.
"""

import collections
import dataclasses
import itertools
import logging
import re
import threading
from collections.abc import Sequence

import jax
import numpy as np

from ..._compat import CALLBACK_LOGGERS, forget_failed_run

ERRORS_OF_JAX = (jax.errors.JaxRuntimeError, ValueError)
"""The exceptions that JAX raises if a callback raises. A call that runs no Python code, on JAX's
fast path, raises `ValueError`.
"""

_MAX_RECENT = 1000
"""Maximum number of unclaimed failures. Failures under raw `jax.jit` are never claimed.
"""


class EqxlikeRuntimeError(RuntimeError):
    """A check of `error_if` or `branched_error_if` has failed."""

    __module__ = "eqxlike"


class EqxlikeTracetimeError(RuntimeError):
    """A check of `error_if` or `branched_error_if` fails regardless of the values of arrays.

    This happens if the predicate is a Python `bool`, `int` or `float`. Then `error_if` itself
    raises the error, before the program runs.
    """

    __module__ = "eqxlike"


# Code written for Equinox uses these names.
EquinoxRuntimeError = EqxlikeRuntimeError
EquinoxTracetimeError = EqxlikeTracetimeError

_serial = itertools.count(1)
_lock = threading.Lock()
_recent: collections.OrderedDict[int, str] = collections.OrderedDict()


def raise_in_callback(message: str) -> None:
    """Raises an error in a callback. `claim_failure` later finds the message of this error."""
    number = next(_serial)
    with _lock:
        _recent[number] = message
        if len(_recent) > _MAX_RECENT:
            _recent.popitem(last=False)
    raise EqxlikeRuntimeError(f"{message}\n[eqxlike failure {number}]")


def claim_failure(error: BaseException) -> EqxlikeRuntimeError | None:
    """Converts JAX's `error` to the `EqxlikeRuntimeError` of the failed check that caused it.

    Returns `None` if no check caused `error`. The caller must raise the returned error, because JAX
    will not report the failure again.
    """
    if not isinstance(error, ERRORS_OF_JAX):
        return None
    # The user's message may quote an earlier failure with its number. The number of this failure
    # comes last.
    found = re.findall(r"\[eqxlike failure (\d+)\]", str(error))
    message = _recent.get(int(found[-1])) if found else None
    if message is None:
        return None
    forget_failed_run()
    return EqxlikeRuntimeError(message)


def _is_news(record: logging.LogRecord) -> bool:
    """Returns `False` for a log record that only repeats the exception of a failed check."""
    return record.exc_info is None or not isinstance(record.exc_info[1], EqxlikeRuntimeError)


for _name in CALLBACK_LOGGERS:
    logging.getLogger(_name).addFilter(_is_news)


# --- The error message of a failed check ---


_MAX_INDICES = 8
"""At most this many indices of a batch are listed."""


@dataclasses.dataclass(frozen=True, eq=False)
class FailureReport:
    """Makes the error message when a check fails.

    **Arguments:**

    - `messages`: the messages of the user. A failed check selects a message by its index.
    - `place`: the file and line of the check in the user's code.
    """

    messages: Sequence[str]
    place: str

    def only(self, index: int) -> "FailureReport":
        """A report with only the message at `index`, for an index that is known at trace time."""
        return FailureReport([self._message(index)], self.place)

    def text(self, failed: np.ndarray, index: np.ndarray | None) -> str:
        """The user's message, the line of the check, and the batch indices at which it failed.

        **Arguments:**

        - `failed`: boolean array with the predicate of each member; it has one axis for each
          `jax.vmap`.
        - `index`: the index of the message for each member, an array with the shape of `failed`.
          `None` selects message 0.
        """
        chosen = 0
        if index is not None:
            chosen = int(index[failed].max())
            failed = failed & (index == chosen)
        return f"{self._message(chosen)}\n(check at {self.place}{_describe_batch(failed)})"

    def _message(self, chosen: int) -> str:
        if -len(self.messages) <= chosen < len(self.messages):
            return self.messages[chosen]
        return (
            f"A check failed with the message index {chosen}, but there are only "
            f"{len(self.messages)} messages."
        )


def _describe_batch(failed: np.ndarray) -> str:
    """Text with the batch indices at which a check failed, or the first few if there are many."""
    if failed.ndim == 0:
        return ""
    places = np.flatnonzero(failed)
    first = places[:_MAX_INDICES]
    indices = zip(*(axis.tolist() for axis in np.unravel_index(first, failed.shape)), strict=True)
    names = [str(index[0] if len(index) == 1 else index) for index in indices]
    if len(places) > len(first):
        names.append(f"{len(places) - len(first)} more")
    listed = names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
    return f", failed for batch {'index' if len(names) == 1 else 'indices'} {listed}"
