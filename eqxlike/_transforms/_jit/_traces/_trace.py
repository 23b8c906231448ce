"""One trace of a compiled function."""

import time
from collections.abc import Iterable
from typing import NamedTuple

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
