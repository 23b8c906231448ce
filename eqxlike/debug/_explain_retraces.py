"""Says of every trace in a block why there was another."""

import contextlib
from collections.abc import Callable, Hashable, Iterator
from typing import Any, Literal

from .._traceback import is_of_user
from .._transforms import History, Trace, check_on_retrace, compared_with, listening, react

_MOST_TRACES = 1000
"""At most this many traces are in the list, the latest."""


@contextlib.contextmanager
def explain_retraces(
    on_retrace: Literal["warn", "error"] | Callable[[Trace], Any] = print,
) -> Iterator[list[Trace]]:
    """A block in which each function of `filter_jit` says why it is traced and compiled again.

    Every trace after the first of a function is told, also where the first came before the block.
    So is the first trace of a function that is defined by the same lines as another one that was
    traced in the block: `filter_jit(lambda x: ...)` in a loop compiles in each turn.

    The block is one for all threads. Calls that trace nothing cost what they always do.

    **Arguments:**

    - `on_retrace`: a function that is called with each such trace, `print` if left out; `"warn"` to
      warn, with the line of the call; `"error"` to raise.

    **Returns:** a context manager, which gives the list of these traces, the latest 1000 of them.

    **Raises:** `ValueError` if `on_retrace` is none of these; in the block, `RetraceError` from the
    call that traces again, with `"error"`.

    !!! example

        >>> import eqxlike as eqx, jax.numpy as jnp
        >>> @eqx.filter_jit
        ... def mean(batch):
        ...     return batch["x"].mean()
        >>> with eqx.debug.explain_retraces() as retraces:
        ...     for size in (32, 32, 8):
        ...         _ = mean({"x": jnp.ones((size, 3))})
        `mean` (...) is traced and compiled again (trace 2). What differs from trace 1:
          batch['x']: shape (32, 3) -> (8, 3)
        A shape is part of a compiled function. ...
        >>> retraces[0].differences[0].path
        "batch['x']"
    """
    check_on_retrace(on_retrace, "explain_retraces")
    retraces: list[Trace] = []
    # The latest trace of the functions from the same lines, and which of these it was.
    last: dict[Hashable, tuple[Trace, int]] = {}

    def listen(trace: Trace, history: History) -> None:
        told = trace if trace.number > 1 else None
        # What this package defines it makes anew for each function that it is given.
        if history.code is not None and is_of_user(history.code.co_filename):
            if told is None and history.definition in last:
                earlier, serial = last[history.definition]
                told = compared_with(trace, earlier, is_same_function=serial == history.serial)
            last[history.definition] = (told or trace, history.serial)
        if told is not None:
            retraces.append(told)
            del retraces[:-_MOST_TRACES]
            react(on_retrace, told)

    with listening(listen):
        yield retraces
