"""How far a loop has come, shown while a compiled program runs."""

import atexit
import dataclasses
import importlib
import itertools
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, Literal, TextIO

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int, PyTree

from .._check_numbers import real_number, whole_number
from .._module import Module, field
from .._progress import DISPLAYS, Lines, is_installed
from .._pytree import describe_node, is_array_like
from ._body import take_arrays
from ._flat._batched import unvmap_any, unvmap_max

_MAX_CALLS = 1000
"""The most calls of Python by a loop of known length. One takes 100 microseconds on a CPU."""

_CALLS_BY_DOUBLING = 128
"""Calls of Python by a loop of unknown length each time its steps double; a power of two."""


def progress(
    total: int | None = None,
    description: str = "",
    *,
    kind: Literal["auto", "rich", "tqdm", "lines", "off"] = "auto",
    every: int | None = None,
    interval_s: float | None = None,
    stream: TextIO | None = None,
) -> "ProgressBar":
    """A bar, or lines, that show how far a loop has come, also from inside a compiled program.

    Make it in the function that is compiled, before the loop: each run of the function then has a
    new bar. The body of the loop calls `bar.update(step, carry)`.

    **Arguments:**

    - `total`: the number of steps, or `None` if it is not known. A bar is closed after the last.
    - `description`: what is shown next to it.
    - `kind`: `"auto"` is a bar on a terminal, by rich or else by tqdm where they are installed, and
      lines of text elsewhere. `"off"` adds nothing to the compiled program. The environment
      variable `EQXLIKE_PROGRESS`, if it is set, overrides this argument.
    - `every`: the number of steps between two calls of Python by the compiled program. By default a
      loop of known length makes 1000 calls at most, and one of unknown length 128 each time its
      steps double: 0.1 s in all, however short a step is.
    - `interval_s`: a call that comes fewer seconds than this after one that was shown is not shown.
      By default 0.1 for a bar and 5 for lines. The end is always shown.
    - `stream`: where to write; standard error by default.

    **Raises:** `ImportError` if the library that `kind` names is not installed; `TypeError` for a
    `stream` that has no `write`; `ValueError` for an unknown `kind`, and unless `total` and `every`
    are integers of at least 0 and 1.

    A bar that is made in the body of a loop, also that of `jax.lax.map`, may show only the first of
    its runs: make it before the loop, and use `inner`.

    A batch under `jax.vmap` has one bar. It shows the member that is furthest: all members run step
    by step together, so that is how many steps have run. Steps that are run again for reverse mode
    do not move the bar.

    !!! example

        >>> import sys, jax, jax.numpy as jnp
        >>> @jax.jit
        ... def train(x):
        ...     bar = progress(3, "training", kind="lines", interval_s=0, stream=sys.stdout)
        ...     def body(x, step):
        ...         bar.update(step, x)
        ...         return 2 * x, None
        ...     return jax.lax.scan(body, x, jnp.arange(3))[0]
        >>> x = train(1.0); jax.effects_barrier()
        training: step 1/3
        training: step 2/3
        training: step 3/3
    """
    level = _level(total, description, every, _MAX_CALLS)
    chosen = _chosen_kind(kind, stream)
    if interval_s is None:
        interval_s = 5.0 if chosen == "lines" else 0.1
    shown = Shown((level,), chosen, real_number(interval_s, "interval_s"), stream)
    if chosen == "off":
        return ProgressBar(None, (), shown)
    struct = jax.ShapeDtypeStruct((), jnp.int32)
    return ProgressBar(jax.pure_callback(BOARD.new_number, struct), (), shown)


@dataclasses.dataclass(frozen=True)
class Level:
    """One of several loops, each inside the one before.

    - `total`: the number of its steps, or `None`.
    - `every`: the number of steps between two calls of Python; `None` if it grows with the steps.
    """

    total: int | None
    description: str
    every: int | None

    def line(self, step: int) -> str:
        text = f"step {step + 1}" if self.total is None else f"step {step + 1}/{self.total}"
        return f"{self.description}: {text}" if self.description else text


@dataclasses.dataclass(frozen=True)
class Shown:
    """A bar as it is known before it runs: its loops, the innermost last, and how it is shown."""

    levels: tuple[Level, ...]
    kind: str
    interval_s: float
    stream: TextIO | None

    def is_end(self, steps: tuple[int, ...]) -> bool:
        """Whether these are the last steps of all its loops."""
        pairs = zip(self.levels, steps, strict=True)
        return all(level.total is not None and step + 1 >= level.total for level, step in pairs)


_UPDATES = itertools.count()


class ProgressBar(Module):
    """What `progress` returns."""

    _number: Int[Array, ""] | None
    _before: tuple[Int[Array, ""], ...]
    _shown: Shown = field(static=True)

    def update(self, step: int | Int[Array, ""], after: PyTree = None) -> None:
        """Shows that this step is done; the first is step 0.

        **Arguments:**

        - `step`: shape `()`.
        - `after`: any pytree, such as the carry: Python is called once its arrays have been
          computed. By default the compiler decides when that is.

        **Raises:** `TypeError` unless `step` is an integer of shape `()`.
        """
        _check_step(step)
        if self._number is None:
            return
        steps = [
            unvmap_max(jax.lax.stop_gradient(jnp.asarray(index).astype(int)))
            for index in (*self._before, step)
        ]
        is_due = jnp.asarray(True)
        for level, index in zip(self._shown.levels, steps, strict=True):
            is_due = is_due & _is_due(level, index)
        number = self._number

        def show(which: Any, steps: Any, number: Any, ready: Any) -> None:
            BOARD.show(self._shown, number, *steps)

        # A constant of its own tells two loops apart: on a GPU XLA called the function of the first
        # for both.
        which = np.asarray(next(_UPDATES), np.int32)

        def call() -> None:
            jax.debug.callback(show, which, steps, number, _readiness(after))

        jax.lax.cond(is_due, call, lambda: None)

    def inner(
        self,
        step: int | Int[Array, ""],
        total: int | None = None,
        description: str = "",
        *,
        every: int | None = None,
    ) -> "ProgressBar":
        """A bar for an inner loop, which starts again in each step of this one.

        **Arguments:**

        - `step`: the number of the step of this loop.
        - `total`, `description`, `every`: as for `progress`. Several inner loops of the same loop
          need different descriptions.

        !!! example

            >>> import sys, jax.numpy as jnp
            >>> epochs = progress(2, "epochs", kind="lines", interval_s=0, stream=sys.stdout)
            >>> batches = epochs.inner(0, 10, "batches")
            >>> batches.update(4); jax.effects_barrier()
            epochs: step 1/2, batches: step 5/10
        """
        _check_step(step)
        levels = self._shown.levels
        calls = _MAX_CALLS
        for level in levels:
            calls //= min(level.total or _CALLS_BY_DOUBLING, calls)
        level = _level(total, description, every, max(calls, 1))
        shown = dataclasses.replace(self._shown, levels=(*levels, level))
        before = () if self._number is None else (*self._before, jnp.asarray(step))
        return ProgressBar(self._number, before, shown)

    def close(self, after: PyTree) -> None:
        """Closes the bar and its inner bars, for a loop that may end before `total`, or has none.

        **Arguments:**

        - `after`: the result of the loop. The bar is closed once it has been computed.
        """
        if self._number is not None:
            jax.debug.callback(
                lambda number, ready: BOARD.close(number), self._number, _readiness(after)
            )


def _level(total: Any, description: str, every: Any, most_calls: int) -> Level:
    if total is not None:
        total = whole_number(total, "total", 0)
    if every is not None:
        every = whole_number(every, "every")
    elif total is not None:
        every = max(-(-total // most_calls), 1)
    return Level(total, description, every)


def _is_due(level: Level, step: Int[Array, ""]) -> Bool[Array, ""]:
    """Whether Python is called after this step."""
    done = step + 1
    if level.every is not None:
        is_due = done % level.every == 0
        return is_due if level.total is None else is_due | (done == level.total)
    # Calls are `2**shift` steps apart, such that `done` is from 128 to 255 times that.
    num_bits = 8 * done.dtype.itemsize - jax.lax.clz(done)
    shift = jnp.maximum(num_bits - _CALLS_BY_DOUBLING.bit_length(), 0)
    return (done >> shift) << shift == done


def _check_step(step: Any) -> None:
    is_integer = is_array_like(step) and jnp.issubdtype(jnp.result_type(step), jnp.integer)
    if not is_integer or jnp.shape(step) != ():
        raise TypeError(
            "A progress bar expected the number of a step, an integer of shape (); got "
            f"{describe_node(step)}."
        )


def _readiness(after: PyTree) -> list[Bool[Array, ""]]:
    """An arbitrary value that is computed from the arrays of `after`, and so after them."""
    arrays = [array for array in map(jax.lax.stop_gradient, take_arrays(after)) if array.size]
    if not arrays:
        return []
    # The callback takes a value, because XLA drops barriers before it orders instructions.
    return [unvmap_any(jnp.stack([jnp.ravel(array)[0] == 0 for array in arrays]))]


# --- The bars that are shown; compiled programs call them ---


_MAX_OPEN = 1000
"""How many runs may have open bars. If there are more, some ended without closing theirs."""


@dataclasses.dataclass
class _Bar:
    display: Lines
    steps: tuple[int, ...]
    shown_at_s: float
    is_at_end: bool = False


class Board:
    """The bars that are shown at this moment.

    **Arguments:**

    - `clock`: the time in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self._lock = threading.RLock()
        self._numbers = itertools.count(1)
        # The bars of each run of a program, until it is closed.
        self._runs: dict[int, dict[Shown, _Bar]] = {}

    def new_number(self) -> np.ndarray:
        """The number of a new run. The compiled program passes it to `show` and `close`."""
        with self._lock:
            number = next(self._numbers)
            self._runs[number] = {}
            if len(self._runs) > _MAX_OPEN:
                self.close(next(iter(self._runs)))
            return np.asarray(number, np.int32)

    def show(self, shown: Shown, number: Any, *steps: Any) -> None:
        """Shows that these steps are done, unless they were before."""
        steps = tuple(map(int, steps))
        with self._lock:
            bars = self._runs.get(int(number))
            if bars is None:
                return
            bar = bars.get(shown)
            if bar is None:
                level, stream = shown.levels[-1], shown.stream or sys.stderr
                display = DISPLAYS[shown.kind](level.total, level.description, stream)
                bar = bars[shown] = _Bar(display, (-1,), self._clock())
            # Reverse mode runs steps again.
            if steps <= bar.steps:
                return
            bar.steps, bar.is_at_end = steps, shown.is_end(steps)
            now_s = self._clock()
            if bar.is_at_end or now_s - bar.shown_at_s >= shown.interval_s:
                bar.shown_at_s = now_s
                self._draw(shown, bar)
            if all(bar.is_at_end for bar in bars.values()):
                self.close(number)

    def _draw(self, shown: Shown, bar: _Bar) -> None:
        pairs = zip(shown.levels, bar.steps, strict=True)
        bar.display.show(bar.steps[-1] + 1, ", ".join(level.line(step) for level, step in pairs))

    def close(self, number: Any) -> None:
        """Shows how far the bars of a run came, and closes them."""
        with self._lock:
            for shown, bar in self._runs.pop(int(number), {}).items():
                if not bar.is_at_end:
                    self._draw(shown, bar)
                bar.display.close()

    def close_all(self) -> None:
        """Closes all open bars, so that a terminal gets its cursor back."""
        with self._lock:
            for number in list(self._runs):
                self.close(number)


BOARD = Board()
atexit.register(BOARD.close_all)


# --- Whether a loop is shown by a bar or by lines ---


_EXTRAS = {"rich": "pip install 'eqxlike[train]'", "tqdm": "pip install tqdm"}
_VARIABLE = "EQXLIKE_PROGRESS"


def _chosen_kind(kind: str, stream: TextIO | None) -> str:
    """The kind to show, from the environment or else from `kind`, and a choice for `"auto"`.

    **Raises:** `ValueError` for an unknown kind; `ImportError` if it is not installed; `TypeError`
    for a stream that is none.
    """
    if stream is not None and not hasattr(stream, "write"):
        raise TypeError(f"loops.progress: stream must be a text stream, got {stream!r}.")
    chosen = os.environ.get(_VARIABLE) or kind
    if chosen not in ("auto", "off", *DISPLAYS):
        kinds = ", ".join(map(repr, ("auto", *DISPLAYS, "off")))
        name = "kind" if chosen == kind else _VARIABLE
        raise ValueError(f"{name} must be one of {kinds}; got {chosen!r}.")
    if chosen == "auto":
        bars = filter(is_installed, _EXTRAS) if (stream or sys.stderr).isatty() else ()
        return next(iter(bars), "lines")
    if chosen in _EXTRAS:
        try:
            importlib.import_module(chosen)
        except ImportError as error:
            raise ImportError(
                f"loops.progress(kind={chosen!r}) needs {chosen}: `{_EXTRAS[chosen]}`, or use "
                "kind='lines'."
            ) from error
    return chosen
