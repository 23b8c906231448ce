"""The profile of a run: each compiled function, the samples of Python, and XLA's own trace."""

import contextlib
import dataclasses
import os
import pathlib
import threading
import time
from collections.abc import Iterator
from typing import Any

import jax

from .._numbers import positive_number
from .._tables import align, rich_table
from .._transforms import CallTimes, timing_calls
from ._functions import HEADER, FunctionTimes, Record
from ._samples import Session, new_profiler, render_html, render_text, write


@dataclasses.dataclass(repr=False)
class Profile:
    """The findings of `profile`, once its block has ended; `str` and `repr` show the table.

    - `functions`: of each function that `filter_jit` wrapped and that was called, those that took
      longest first.
    - `elapsed_s`: the seconds that the block took.
    - `session`: the samples, a session of pyinstrument; `None` if there are none.
    """

    functions: tuple[FunctionTimes, ...] = ()
    elapsed_s: float = 0.0
    session: Session = None

    def __str__(self) -> str:
        return f"{align(HEADER, self._rows)}\n{self.totals}"

    __repr__ = __str__

    def __rich__(self) -> Any:
        return rich_table(HEADER, self._rows, self.totals)

    @property
    def _rows(self) -> list[tuple[str, ...]]:
        return [each.cells for each in self.functions]

    @property
    def totals(self) -> str:
        """The last line of the table."""
        in_calls_s = sum(each.total_s for each in self.functions)
        share = in_calls_s / self.elapsed_s if self.elapsed_s else 0.0
        return f"{self.elapsed_s:.3f} s, {share:.0%} of them in these calls"

    @property
    def tree(self) -> str:
        """The tree of Python's calls, every frame shown.

        **Raises:** `ValueError` without samples.
        """
        return render_text(self._sampled())

    @property
    def page(self) -> str:
        """The same as a page of HTML, with a timeline.

        **Raises:** `ValueError` without samples.
        """
        return render_html(self._sampled())

    def write(self, path: str | os.PathLike[str]) -> list[pathlib.Path]:
        """Writes the tree, the page and the session of pyinstrument beside each other.

        **Arguments:**

        - `path`: the path of the files, without a suffix.

        **Returns:** the files written.

        **Raises:** `ValueError` without samples.
        """
        return write(self._sampled(), pathlib.Path(path))

    def _sampled(self) -> Session:
        if self.session is None:
            raise ValueError(
                "This profile has no samples: write `with eqxlike.profile(sample=True) as p:`, and "
                "ask once the block has ended."
            )
        return self.session


@contextlib.contextmanager
def profile(
    *,
    wait: bool = True,
    sample: bool = False,
    interval_s: float = 1e-3,
    trace: str | os.PathLike[str] | None = None,
) -> Iterator[Profile]:
    """A context that tells where the time of what runs in it goes.

    Each call of a function that `filter_jit` wrapped is timed, and its time split: what our Python
    takes, what JAX takes to dispatch the compiled program, and what then is left until the result
    is ready. Calls that trace and compile are counted by themselves. Outside of the context a call
    costs what it always does. Functions of `jax.jit` are not seen, unless `sample` shows them.

    **Arguments:**

    - `wait`: whether to wait for the result of each call: without that, nobody knows when it was
      ready. A loop that reads no result runs ahead of the device, and is slower so.
    - `sample`: whether to sample the Python stack with pyinstrument, which makes every call of a
      Python function slower: take times without it.
    - `interval_s`: the least time between two samples, in seconds.
    - `trace`: a folder for XLA's own trace, `jax.profiler.trace`; the `perfetto_trace.json.gz` in
      it is for https://ui.perfetto.dev.

    **Returns:** a context that gives a `Profile`, which is filled as the context ends.

    **Raises:** `ImportError` if `sample` and pyinstrument is not installed; `RuntimeError` if
    somebody profiles already; `TypeError` or `ValueError` for an `interval_s` that is no positive
    number, or a `trace` that is no path.

    !!! example

        >>> import eqxlike as eqx, jax.numpy as jnp
        >>> @eqx.filter_jit
        ... def step(x):
        ...     return 2 * x
        >>> x = jnp.ones(3)
        >>> with eqx.profile() as p:
        ...     for _ in range(10):
        ...         x = step(x)
        >>> found = p.functions[0]
        >>> found.num_calls, found.num_traces, found.split.total_us > 0
        (10, 1, True)
    """
    interval_s = positive_number(interval_s, "interval_s")
    trace = None if trace is None else os.fspath(trace)
    found = Profile()
    records: dict[Any, Record] = {}
    lock = threading.Lock()

    def report(call: CallTimes) -> None:
        with lock:
            if call.dispatcher not in records:
                records[call.dispatcher] = Record(call.dispatcher.full_name)
            records[call.dispatcher].add(call)

    profiler = new_profiler(interval_s) if sample else None
    with contextlib.ExitStack() as stack:
        if trace is not None:
            stack.enter_context(jax.profiler.trace(trace, create_perfetto_trace=True))
        stack.enter_context(timing_calls(report, wait))
        start_s = time.perf_counter()
        if profiler is not None:
            profiler.start()
        try:
            yield found
        finally:
            if profiler is not None:
                found.session = profiler.stop()
            found.elapsed_s = time.perf_counter() - start_s
            times = (each.times() for each in list(records.values()))
            found.functions = tuple(sorted(times, key=lambda each: -each.total_s))
