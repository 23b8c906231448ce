"""The default of a parameter that has no value of its own to say "left out"."""

from typing import Any


class _Missing:
    """The class of `MISSING`, which says in signatures what it means."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "<missing>"


MISSING: Any = _Missing()
