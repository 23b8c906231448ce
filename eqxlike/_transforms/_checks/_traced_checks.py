"""The checks that this thread has met while it traces, and whether it traces for many devices."""

import threading
from typing import Any


class _Traced(threading.local):
    num_checks: int = 0
    is_for_several_devices: bool = False


_traced = _Traced()
_has_any_been_traced = False


def note_check() -> None:
    """Notes that a check has become part of what this thread is tracing."""
    global _has_any_been_traced
    _has_any_been_traced = True
    _traced.num_checks += 1


def has_any_check_been_traced() -> bool:
    """Whether any thread has ever traced a check."""
    return _has_any_been_traced


def is_for_several_devices() -> bool:
    """Whether what this thread is tracing is known to be for more than one device."""
    return _traced.is_for_several_devices


class TracedProgram:
    """A context in which a function of `filter_jit` is traced."""

    def __init__(self, is_for_several_devices: bool):
        self._is_for_several_devices = is_for_several_devices

    def __enter__(self) -> "TracedProgram":
        self._num_checks = _traced.num_checks
        self._outer = _traced.is_for_several_devices
        _traced.is_for_several_devices = self._outer or self._is_for_several_devices
        return self

    def __exit__(self, *exception: Any) -> None:
        _traced.is_for_several_devices = self._outer

    @property
    def holds_check(self) -> bool:
        return _traced.num_checks != self._num_checks
