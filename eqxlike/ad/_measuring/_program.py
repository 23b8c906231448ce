"""Functions compiled anew, with what the clock and XLA say of them."""

import dataclasses
import functools
import re
import time
from collections.abc import Callable
from typing import Any

from ..._transforms import filter_jit, filter_make_jaxpr
from ._jaxprs import has_loop, num_equations, work

_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?\S+ = ", re.MULTILINE)


@dataclasses.dataclass(frozen=True)
class Program:
    """A compiled function.

    - `run`: calls it with the arguments that it was compiled for.
    - `work`: how much it computes, to be compared with that of others.
    - `has_loop`: whether it has a loop.
    - `first_call_ms`, `traced_operations`, `compiled_operations`, `peak_bytes`: see
      `ComparisonRow`.
    """

    run: Callable[[], Any]
    work: int
    has_loop: bool
    first_call_ms: float
    traced_operations: int
    compiled_operations: int | None
    peak_bytes: int | None


def compiled_anew(function: Callable[..., Any], args: tuple[Any, ...]) -> Program:
    """`function`, compiled by `filter_jit` for `args`, though it may have been before."""
    jitted = filter_jit(functools.partial(_another_call(), function))
    start_s = time.perf_counter()
    ahead = jitted.lower(*args).compile()
    first_call_ms = 1e3 * (time.perf_counter() - start_s)
    closed, _, _ = filter_make_jaxpr(function)(*args)
    text, memory = ahead.as_text(), ahead.memory_analysis()
    return Program(
        run=lambda: jitted(*args),
        work=work(closed.jaxpr),
        has_loop=has_loop(closed.jaxpr),
        first_call_ms=first_call_ms,
        traced_operations=num_equations(closed.jaxpr),
        compiled_operations=None if text is None else len(_INSTRUCTION.findall(text)),
        peak_bytes=None if memory is None else memory.temp_size_in_bytes,
    )


def _another_call() -> Callable[..., Any]:
    """A function that calls its first argument; each is another one to `filter_jit`."""

    def call(function: Callable[..., Any], /, *args: Any) -> Any:
        return function(*args)

    return call
