"""Progress bars for loops inside compiled programs."""

import atexit
import dataclasses
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
from .._names import import_extra
from .._pytree import describe_node, is_array_like
from .._runs import DISPLAYS, Lines, is_installed
from ._body import take_arrays
from ._primitives import unvmap_any, unvmap_max

_MAX_CALLS = 1000
"""The largest number of callbacks from a loop of known length. A callback takes 100 us on a CPU."""

_CALLS_BY_DOUBLING = 128
"""A loop of unknown length makes this many callbacks each time that its number of steps doubles.
This is a power of two.
"""


def progress(
    total: int | None = None,
    description: str = "",
    *,
    kind: Literal["auto", "rich", "tqdm", "lines", "off"] = "auto",
    every: int | None = None,
    interval_s: float | None = None,
    stream: TextIO | None = None,
) -> "ProgressBar":
    """Shows the progress of a loop, also inside a compiled program.

    Make the bar in the compiled function, before the loop. Then each run of the function has a new
    bar. Call `bar.update(step, carry)` in the body of the loop.

    Do not make a bar in the body of a loop, or of `jax.lax.map`. Such a bar may show only the first
    iteration. For an inner loop, make a bar before the outer loop, and call `bar.inner` in the body
    of the outer loop.

    Under `jax.vmap`, the whole batch has one bar, which shows the largest step of all members.
    Reverse mode may run steps a second time; the bar then does not move back.

    **Arguments:**

    - `total`: the number of steps, or `None` if it is not known. The bar closes after the last
      step.
    - `description`: text next to the bar.
    - `kind`: `"auto"` shows a bar if the output is a terminal and rich or tqdm is installed, and
      lines of text otherwise. `"off"` adds nothing to the compiled program. The environment
      variable `EQXLIKE_PROGRESS` overrides this argument if it is set.
    - `every`: the number of steps between two callbacks from the compiled program. By default, a
      loop of known length makes at most 1000 callbacks, which take about 0.1 s in total, however
      short a step is. A loop of unknown length makes 128 callbacks each time that its number of
      steps doubles.
    - `interval_s`: minimum number of seconds between two updates of the display. By default 0.1 for
      a bar and 5 for lines. The last step is always shown.
    - `stream`: text stream to write to; standard error by default.

    **Raises:**

    - `ImportError` if the library that `kind` names is not installed.
    - `TypeError` if `stream` has no method `write`.
    - `ValueError` if `kind` is unknown.
    - `ValueError` if `total` is not an integer of at least 0.
    - `ValueError` if `every` is not an integer of at least 1.

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
    chosen = _resolve_kind(kind, stream)
    if interval_s is None:
        interval_s = 5.0 if chosen == "lines" else 0.1
    settings = BarSettings((level,), chosen, real_number(interval_s, "interval_s"), stream)
    if chosen == "off":
        return ProgressBar(None, (), settings)
    struct = jax.ShapeDtypeStruct((), jnp.int32)
    return ProgressBar(jax.pure_callback(OPEN_BARS.new_number, struct), (), settings)


@dataclasses.dataclass(frozen=True)
class Level:
    """One of several nested loops.

    - `total`: the number of steps of the loop, or `None` if it is not known.
    - `every`: the number of steps between two callbacks. `None` if it grows with the number of
      steps.
    """

    total: int | None
    description: str
    every: int | None

    def line(self, step: int) -> str:
        text = f"step {step + 1}" if self.total is None else f"step {step + 1}/{self.total}"
        return f"{self.description}: {text}" if self.description else text


@dataclasses.dataclass(frozen=True)
class BarSettings:
    """The static settings of a bar: its loops, with the innermost one last, and its display."""

    levels: tuple[Level, ...]
    kind: str
    interval_s: float
    stream: TextIO | None

    def is_end(self, steps: tuple[int, ...]) -> bool:
        """Whether `steps` are the last steps of all loops."""
        pairs = zip(self.levels, steps, strict=True)
        return all(level.total is not None and step + 1 >= level.total for level, step in pairs)


_UPDATES = itertools.count()


class ProgressBar(Module):
    """The bar that `progress` returns."""

    _number: Int[Array, ""] | None
    _before: tuple[Int[Array, ""], ...]
    _settings: BarSettings = field(static=True)

    def update(self, step: int | Int[Array, ""], after: PyTree = None) -> None:
        """Reports that a step is done.

        **Arguments:**

        - `step`: the number of the step, from 0; an integer of shape `()`.
        - `after`: any pytree, such as the carry. The callback runs after the arrays in `after` have
          been computed. Without `after`, the compiler chooses the time of the callback.

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
        for level, index in zip(self._settings.levels, steps, strict=True):
            is_due = is_due & _is_due(level, index)
        number = self._number

        def show(which: Any, steps: Any, number: Any, ready: Any) -> None:
            OPEN_BARS.show(self._settings, number, *steps)

        # Give each callback a different constant. Without the constant, XLA merged the callbacks of
        # two loops on a GPU, and called the first callback for both loops.
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
        """Makes a bar for an inner loop. The bar starts again in each step of the outer loop.

        **Arguments:**

        - `step`: the current step of the outer loop, from 0.
        - `total`, `description`, `every`: as for `progress`. If an outer loop has several inner
          loops, the inner loops need different descriptions.

        !!! example

            >>> import sys, jax.numpy as jnp
            >>> epochs = progress(2, "epochs", kind="lines", interval_s=0, stream=sys.stdout)
            >>> batches = epochs.inner(0, 10, "batches")
            >>> batches.update(4); jax.effects_barrier()
            epochs: step 1/2, batches: step 5/10
        """
        _check_step(step)
        levels = self._settings.levels
        calls = _MAX_CALLS
        for level in levels:
            calls //= min(level.total or _CALLS_BY_DOUBLING, calls)
        level = _level(total, description, every, max(calls, 1))
        settings = dataclasses.replace(self._settings, levels=(*levels, level))
        before = () if self._number is None else (*self._before, jnp.asarray(step))
        return ProgressBar(self._number, before, settings)

    def close(self, after: PyTree) -> None:
        """Closes the bar and its inner bars. Needed if a loop has no `total` or may end early.

        **Arguments:**

        - `after`: the result of the loop. The bar closes after this result has been computed.
        """
        if self._number is not None:
            jax.debug.callback(
                lambda number, ready: OPEN_BARS.close(number), self._number, _readiness(after)
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
    """Whether the callback runs after this step."""
    done = step + 1
    if level.every is not None:
        is_due = done % level.every == 0
        return is_due if level.total is None else is_due | (done == level.total)
    # Callbacks are `2**shift` steps apart, with `128 <= done / 2**shift < 256`.
    num_bits = 8 * done.dtype.itemsize - jax.lax.clz(done)
    shift = jnp.maximum(num_bits - _CALLS_BY_DOUBLING.bit_length(), 0)
    return (done >> shift) << shift == done


def _check_step(step: Any) -> None:
    is_integer = is_array_like(step) and jnp.issubdtype(jnp.result_type(step), jnp.integer)
    if not is_integer or jnp.shape(step) != ():
        raise TypeError(
            "A progress bar expected `step` to be an integer of shape (), got "
            f"{describe_node(step)}."
        )


def _readiness(after: PyTree) -> list[Bool[Array, ""]]:
    """Returns a list with at most one boolean, which depends on all arrays of `after`."""
    arrays = [array for array in map(jax.lax.stop_gradient, take_arrays(after)) if array.size]
    if not arrays:
        return []
    # `jax.lax.optimization_barrier` would not work: XLA drops barriers before it schedules
    # instructions.
    return [unvmap_any(jnp.stack([jnp.ravel(array)[0] == 0 for array in arrays]))]


# --- The open bars, which the callbacks of compiled programs update ---


_MAX_OPEN = 1000
"""The largest number of runs with open bars. If there are more, the oldest run's bars are
closed.
"""


@dataclasses.dataclass
class _Bar:
    display: Lines
    steps: tuple[int, ...]
    shown_at_s: float
    is_at_end: bool = False


class OpenBars:
    """The open bars of all running programs.

    **Arguments:**

    - `clock`: function that returns the time in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self._lock = threading.RLock()
        self._numbers = itertools.count(1)
        # The keys are the numbers of runs. The values are the open bars of each run.
        self._runs: dict[int, dict[BarSettings, _Bar]] = {}

    def new_number(self) -> np.ndarray:
        """Registers a run, and returns the number that the program passes to `show` and `close`."""
        with self._lock:
            number = next(self._numbers)
            self._runs[number] = {}
            if len(self._runs) > _MAX_OPEN:
                self.close(next(iter(self._runs)))
            return np.asarray(number, np.int32)

    def show(self, settings: BarSettings, number: Any, *steps: Any) -> None:
        """Shows `steps`, the current step of each loop, unless later steps were shown before."""
        steps = tuple(map(int, steps))
        with self._lock:
            bars = self._runs.get(int(number))
            if bars is None:
                return
            bar = bars.get(settings)
            if bar is None:
                level, stream = settings.levels[-1], settings.stream or sys.stderr
                display = DISPLAYS[settings.kind](level.total, level.description, stream)
                bar = bars[settings] = _Bar(display, (-1,), self._clock())
            # Reverse mode runs earlier steps a second time.
            if steps <= bar.steps:
                return
            bar.steps, bar.is_at_end = steps, settings.is_end(steps)
            now_s = self._clock()
            if bar.is_at_end or now_s - bar.shown_at_s >= settings.interval_s:
                bar.shown_at_s = now_s
                self._draw(settings, bar)
            if all(bar.is_at_end for bar in bars.values()):
                self.close(number)

    def _draw(self, settings: BarSettings, bar: _Bar) -> None:
        pairs = zip(settings.levels, bar.steps, strict=True)
        bar.display.show(bar.steps[-1] + 1, ", ".join(level.line(step) for level, step in pairs))

    def close(self, number: Any) -> None:
        """Shows the last state of each bar of a run, and closes the bars."""
        with self._lock:
            for settings, bar in self._runs.pop(int(number), {}).items():
                if not bar.is_at_end:
                    self._draw(settings, bar)
                bar.display.close()

    def close_all(self) -> None:
        """Closes all open bars, so that a terminal gets its cursor back."""
        with self._lock:
            for number in list(self._runs):
                self.close(number)


OPEN_BARS = OpenBars()
atexit.register(OPEN_BARS.close_all)


# --- The choice of the display ---


_EXTRAS = {"rich": "pip install 'eqxlike[train]'", "tqdm": "pip install tqdm"}
_VARIABLE = "EQXLIKE_PROGRESS"


def _resolve_kind(kind: str, stream: TextIO | None) -> str:
    """The display for `kind`, or for `EQXLIKE_PROGRESS` if this variable is set. Resolves `"auto"`.

    **Raises:**

    - `ValueError` if the kind is unknown.
    - `ImportError` if the library of the kind is not installed.
    - `TypeError` if `stream` is not a text stream.
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
        import_extra(
            chosen,
            f"loops.progress(kind={chosen!r}) needs {chosen}: `{_EXTRAS[chosen]}`, or use "
            "kind='lines'.",
        )
    return chosen
