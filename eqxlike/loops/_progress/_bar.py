"""How far a loop has come, shown while a compiled program runs."""

import dataclasses
from typing import Any, Literal, TextIO

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, PyTree

from ..._module import Module, field
from ..._numbers import real_number, whole_number
from ..._pytree import describe_node, is_array_like
from .._carry import take_arrays
from .._flat._batched import unvmap_any, unvmap_max
from ._board import BOARD, Level, Shown
from ._displays import chosen_kind

_MOST_CALLS = 1000
"""Of Python, by a loop of known length. A call takes 100 microseconds on a CPU."""

_CALLS_BY_DOUBLING = 128
"""By a loop of unknown length, each time that the number of its steps doubles; a power of two."""


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

    Make it in the function that is compiled, before the loop: each time that the function runs it
    has a new bar. The body of the loop calls `bar.update(step, carry)`.

    **Arguments:**

    - `total`: the number of steps, or `None` if it is not known. A bar is closed after so many.
    - `description`: what is shown beside it.
    - `kind`: `"auto"` is a bar on a terminal, by rich or else by tqdm where they are installed, and
      lines of text elsewhere. With `"off"` nothing at all is compiled. The environment variable
      `EQXLIKE_PROGRESS`, if there is one, goes before this argument.
    - `every`: the compiled program calls Python once in so many steps. By default that is chosen so
      that a loop of known length makes 1000 calls at most, and one of unknown length 128 each time
      that its steps double: 0.1 s in all, however short a step is.
    - `interval_s`: of these calls, those that come sooner than so many seconds after one that was
      shown are not. By default 0.1 for a bar and 5 for lines. The end is always shown.
    - `stream`: where to write; standard error by default.

    **Raises:** `ImportError` if what `kind` names is not installed; `ValueError` for an unknown
    `kind`, and unless `total` and `every` are integers of at least 0 and 1.

    Of a batch under `jax.vmap` there is one bar, that of the member that has come furthest: all go
    on step by step together, so that is how many steps have been run. For the reverse mode loops
    run steps again; these do not move the bar.

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
    level = _level(total, description, every, _MOST_CALLS)
    chosen = chosen_kind(kind, stream)
    if interval_s is None:
        interval_s = 5.0 if chosen == "lines" else 0.1
    shown = Shown((level,), chosen, real_number(interval_s, "interval_s"), stream)
    if chosen == "off":
        return ProgressBar(None, (), shown)
    struct = jax.ShapeDtypeStruct((), jnp.int32)
    return ProgressBar(jax.pure_callback(BOARD.new_number, struct), (), shown)


class ProgressBar(Module):
    """What `progress` returns."""

    _number: Int[Array, ""] | None
    _before: tuple[Int[Array, ""], ...]
    _shown: Shown = field(static=True)

    def update(self, step: int | Int[Array, ""], after: PyTree = None) -> None:
        """Shows that the step of this number, from 0 on, is done.

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
            unvmap_max(jax.lax.stop_gradient(jnp.asarray(each).astype(int)))
            for each in (*self._before, step)
        ]
        is_due = jnp.asarray(True)
        for level, each in zip(self._shown.levels, steps, strict=True):
            is_due = is_due & _is_due(level, each)
        number = self._number

        def show(steps: Any, number: Any, ready: Any) -> None:
            BOARD.show(self._shown, number, *steps)

        def call() -> None:
            jax.debug.callback(show, steps, number, _readiness(after))

        jax.lax.cond(is_due, call, lambda: None)

    def inner(
        self,
        step: int | Int[Array, ""],
        total: int | None = None,
        description: str = "",
        *,
        every: int | None = None,
    ) -> "ProgressBar":
        """A bar for a loop inside, which begins anew in each step of this one.

        **Arguments:**

        - `step`: the number of the step of this loop.
        - `total`, `description`, `every`: as for `progress`. Loops inside the same one need
          descriptions of their own.

        !!! example

            >>> import sys, jax.numpy as jnp
            >>> epochs = progress(2, "epochs", kind="lines", interval_s=0, stream=sys.stdout)
            >>> batches = epochs.inner(0, 10, "batches")
            >>> batches.update(4); jax.effects_barrier()
            epochs: step 1/2, batches: step 5/10
        """
        _check_step(step)
        levels = self._shown.levels
        calls = _MOST_CALLS
        for level in levels:
            calls //= min(level.total or _CALLS_BY_DOUBLING, calls)
        level = _level(total, description, every, max(calls, 1))
        shown = dataclasses.replace(self._shown, levels=(*levels, level))
        before = () if self._number is None else (*self._before, jnp.asarray(step))
        return ProgressBar(self._number, before, shown)

    def close(self, after: PyTree) -> None:
        """Closes the bar and those inside, for a loop that may end before its `total`, or has none.

        **Arguments:**

        - `after`: what the loop returned. The bar is closed once it has been computed.
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
    # The distance is the power of two of which the number of steps has from 128 to 255.
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
    """One value that is there once the arrays of `after` are. What it is does not matter."""
    arrays = [each for each in map(jax.lax.stop_gradient, take_arrays(after)) if each.size]
    if not arrays:
        return []
    # A value that the callback takes: a barrier is gone when XLA puts instructions in order.
    return [unvmap_any(jnp.stack([jnp.ravel(each)[0] == 0 for each in arrays]))]
