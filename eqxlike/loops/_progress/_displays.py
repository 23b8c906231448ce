"""Bars and lines, as they appear on a terminal or elsewhere."""

import importlib
import importlib.util
import os
import sys
from collections.abc import Callable
from typing import Any, ClassVar, Protocol, TextIO

_VARIABLE = "EQXLIKE_PROGRESS"


class Described(Protocol):
    """What is said of the loop that is shown."""

    @property
    def total(self) -> int | None: ...

    @property
    def description(self) -> str: ...


class Display(Protocol):
    """A bar, or what prints lines."""

    def show(self, done: int, line: str) -> None:
        """Shows that so many steps are done, which the line says in words."""

    def close(self) -> None:
        """Shows nothing from now on."""


def chosen_kind(kind: str, stream: TextIO | None) -> str:
    """What `"auto"` comes to, or what the environment says instead.

    **Raises:** `ValueError` for an unknown kind; `ImportError` if it is not installed.
    """
    found = os.environ.get(_VARIABLE) or kind
    if found not in ("auto", "off", *_KINDS):
        kinds = ", ".join(map(repr, ("auto", *_KINDS, "off")))
        name = "kind" if found == kind else _VARIABLE
        raise ValueError(f"{name} must be one of {kinds}; got {found!r}.")
    if found == "auto":
        installed = [name for name in _EXTRAS if importlib.util.find_spec(name) is not None]
        return (installed or ["lines"])[0] if (stream or sys.stderr).isatty() else "lines"
    if found in _EXTRAS:
        _check_installed(found)
    return found


def open_display(kind: str, level: Described, stream: TextIO | None) -> Display:
    """Opens what shows the loop of this level."""
    return _KINDS[kind](level, stream or sys.stderr)


class _Lines:
    """Prints a line each time."""

    def __init__(self, level: Described, stream: TextIO):
        self._stream = stream

    def show(self, done: int, line: str) -> None:
        print(line, file=self._stream, flush=True)

    def close(self) -> None:
        pass


class _Tqdm:
    """A bar by tqdm."""

    def __init__(self, level: Described, stream: TextIO):
        import tqdm

        # When to draw is decided elsewhere.
        self._bar = tqdm.tqdm(
            total=level.total, desc=level.description or None, file=stream, mininterval=0
        )

    def show(self, done: int, line: str) -> None:
        if done <= self._bar.n:
            self._bar.reset()
        self._bar.n = done
        self._bar.refresh()

    def close(self) -> None:
        self._bar.close()


class _Rich:
    """A bar by rich. All those on one stream are drawn together."""

    _together: ClassVar[dict[TextIO, Any]] = {}

    def __init__(self, level: Described, stream: TextIO):
        self._stream = stream
        if stream not in self._together:
            self._together[stream] = _rich_progress(stream)
            self._together[stream].start()
        self._bars = self._together[stream]
        self._task = self._bars.add_task(level.description, total=level.total)
        self._bars.refresh()
        self._done = 0

    def show(self, done: int, line: str) -> None:
        if done <= self._done:
            self._bars.reset(self._task)
        self._done = done
        self._bars.update(self._task, completed=done)
        self._bars.refresh()

    def close(self) -> None:
        self._bars.stop_task(self._task)
        if all(task.stop_time is not None for task in self._bars.tasks):
            self._bars.stop()
            self._together.pop(self._stream, None)


def _rich_progress(stream: TextIO) -> Any:
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    return Progress(*columns, console=Console(file=stream), auto_refresh=False)


_KINDS: dict[str, Callable[[Described, TextIO], Display]] = {
    "rich": _Rich,
    "tqdm": _Tqdm,
    "lines": _Lines,
}
_EXTRAS = {"rich": "pip install 'eqxlike[train]'", "tqdm": "pip install tqdm"}


def _check_installed(name: str) -> None:
    try:
        importlib.import_module(name)
    except ImportError as error:
        raise ImportError(
            f"loops.progress(kind={name!r}) needs {name}: `{_EXTRAS[name]}`, or use kind='lines'."
        ) from error
