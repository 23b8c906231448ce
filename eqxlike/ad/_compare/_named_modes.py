"""Modes by the names that tables call them."""

import dataclasses
import importlib.util
from collections.abc import Iterable, Mapping
from typing import Any

from ..._transforms._derivatives._by_mode import check_mode
from .._modes import Auto, Checkpointed, Enzyme, FiniteDifference, Forward, Mode, Reverse

CHUNK = 64
"""So many directions at once keep a CPU busy, and memory within bounds."""

Modes = Iterable[Mode] | Mapping[str, Mode] | None


def named_modes(modes: Modes, caller: str) -> dict[str, Mode]:
    """The modes that `caller` was given, by name; those that there are, for `None`.

    **Raises:** `TypeError` for what is no mode, or a name that is no string; `ValueError` if there
    are none.
    """
    if modes is None:
        modes = [Reverse(), Checkpointed(), Forward(CHUNK), FiniteDifference()]
        modes += [Enzyme()] if importlib.util.find_spec("enzyme_ad") else []
        modes += [Auto()]
    if isinstance(modes, Mapping):
        for name in modes:
            if not isinstance(name, str) or not name:
                raise TypeError(
                    f"`{caller}` expects the names of modes to be strings, and not empty; got "
                    f"{name!r}."
                )
        named: list[tuple[Any, Any]] = list(modes.items())
    elif isinstance(modes, Iterable) and not isinstance(modes, str):
        named = [(as_written(each), each) for each in modes]
    else:
        raise TypeError(
            f"`{caller}` expects as `modes` a sequence of modes, or a mapping from names to modes; "
            f"got {modes!r}."
        )
    if not named:
        raise ValueError(f"`{caller}` expects at least one mode; `modes` is empty.")
    found: dict[str, Mode] = {}
    for name, mode in named:
        check_mode(mode, caller)
        found[_unused(name, found)] = mode
    return found


def as_written(mode: Any) -> str:
    """A mode as one writes it, without the arguments that it has by default.

    >>> as_written(Forward(chunk=8)), as_written(FiniteDifference(order=2))
    ('Forward(chunk=8)', 'FiniteDifference()')
    """
    if not isinstance(mode, Mode):
        return type(mode).__name__
    given = {
        each.name: getattr(mode, each.name)
        for each in dataclasses.fields(mode)
        if each.repr and getattr(mode, each.name, None) is not each.default
    }
    shown = (f"{name}={getattr(value, '__name__', repr(value))}" for name, value in given.items())
    return f"{type(mode).__name__}({', '.join(shown)})"


def _unused(name: str, names: Iterable[str]) -> str:
    """`name`, with a number behind it if it is among `names`."""
    number, candidate = 1, name
    while candidate in names:
        number += 1
        candidate = f"{name} #{number}"
    return candidate
