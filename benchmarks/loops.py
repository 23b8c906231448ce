"""The cost of loops forwards and backwards, compared with `jax.lax.scan` and Equinox's loops.

A check before timing ensures that all columns of a row compute the same numbers. The notes of a row
show the temporary memory of each column, as estimated by XLA, and the time to trace and compile it.
`benchmarks.timing` describes the method. Ctrl-C prints the finished rows.
"""

import functools
import importlib
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from operator import truediv
from typing import Any

import jax
import jax.numpy as jnp
import jax.random as jr

from benchmarks import command
from benchmarks.cases import Case
from eqxlike import loops

NAME = "benchmarks.loops"
ROUNDS = command.Rounds(default=30, quick=7)

SCAN = "lax.scan"
WHILE = "lax.while_loop"
MASKED = "masked lax.scan"
EQUINOX = "equinox.internal"

FIRST_CALLS = 3
"""The number of first calls that are timed."""

Recurrence = Callable[[Any, Any], Any]
"""`step(parameters, carry) -> carry`."""

Run = Callable[[Any, Any], Any]
"""`run(parameters, carry) -> carry`."""


Library = Callable[[], Any]


def ours() -> Any:
    """Our loops."""
    return loops


def equinox_loops() -> Any:
    """Equinox's loops. Raises ImportError if Equinox is not installed."""
    return importlib.import_module("equinox.internal")


def in_scan(step: Recurrence, length: int) -> Run:
    """The loop with `jax.lax.scan`."""

    def run(parameters: Any, carry: Any) -> Any:
        body = lambda carry, _: (step(parameters, carry), None)  # noqa: E731
        return jax.lax.scan(body, carry, None, length)[0]

    return run


def scanned(library: Library, kind: str, step: Recurrence, length: int) -> Run:
    """The loop with the `scan` of a library."""

    def run(parameters: Any, carry: Any) -> Any:
        body = lambda carry, _: (step(parameters, carry), None)  # noqa: E731
        return library().scan(body, carry, None, length, kind=kind)[0]

    return run


def whiled(library: Library, kind: str, step: Recurrence, length: Any, most: int) -> Run:
    """The loop with the `while_loop` of a library and a maximum number of steps."""

    def run(parameters: Any, carry: Any) -> Any:
        return library().while_loop(
            lambda state: state[0] < length,
            lambda state: (state[0] + 1, step(parameters, state[1])),
            (jnp.array(0), carry),
            max_steps=most,
            kind=kind,
        )[1]

    return run


def of_jax(step: Recurrence, length: Any) -> Run:
    """The loop with `jax.lax.while_loop`."""

    def run(parameters: Any, carry: Any) -> Any:
        return jax.lax.while_loop(
            lambda state: state[0] < length,
            lambda state: (state[0] + 1, step(parameters, state[1])),
            (jnp.array(0), carry),
        )[1]

    return run


def masked(step: Recurrence, length: Any, most: int) -> Run:
    """The loop as a scan of the maximum length that masks steps after the actual length."""

    def run(parameters: Any, carry: Any) -> Any:
        def body(carry: Any, index: Any) -> tuple[Any, None]:
            return jnp.where(index < length, step(parameters, carry), carry), None

        return jax.lax.scan(body, carry, jnp.arange(most))[0]

    return run


def forward(run: Run) -> Callable[[Any, Any], Any]:
    """A function that returns only the value."""
    return lambda parameters, carry: jnp.sum(run(parameters, carry) ** 2)


def gradient(run: Run) -> Callable[[Any, Any], Any]:
    """A function that returns the gradient with respect to the parameters."""
    return jax.grad(forward(run))


class Compiled:
    """A function with its arguments, compiled ahead of time.

    - `temporary_bytes`: the temporary memory, as estimated by XLA.
    """

    def __init__(self, function: Callable[[Any, Any], Any], arguments: tuple[Any, Any]):
        self._function = function
        self._arguments = arguments
        self._compiled = self._compile()
        memory = self._compiled.memory_analysis()
        self.temporary_bytes: int | None = getattr(memory, "temp_size_in_bytes", None)

    def __call__(self) -> Any:
        return self._compiled(*self._arguments)

    def _compile(self) -> Any:
        return jax.jit(self._function).lower(*self._arguments).compile()

    def seconds_to_compile(self) -> float:
        """The time to trace and compile without caches."""
        jax.clear_caches()
        start = time.perf_counter()
        self._compile()
        return time.perf_counter() - start


def case(
    name: str,
    way: Callable[[Run], Callable[[Any, Any], Any]],
    runs: Mapping[str, Run],
    arguments: tuple[Any, Any],
) -> Case:
    """The row that compares `runs`. The first run is the denominator of ratios."""
    builders = {
        column: functools.partial(Compiled, way(run), arguments) for column, run in runs.items()
    }
    return Case(name, builders, baseline=next(iter(runs)))


def scalar(parameters: Any, carry: Any) -> Any:
    """A step with almost no work, to measure the overhead of the loop."""
    return jnp.sin(parameters * carry) + 0.1


def recurrent(parameters: Any, carry: Any) -> Any:
    """A step of a recurrent network."""
    return jnp.tanh(parameters @ carry)


WEIGHTS = jr.normal(jr.key(0), (64, 64)) / 8
STEPS: Mapping[str, tuple[Recurrence, tuple[Any, Any]]] = {
    "scalar": (scalar, (jnp.array(0.9), jnp.array(0.3))),
    "64-wide tanh": (recurrent, (WEIGHTS, jnp.ones(64))),
}


def recurrence(name: str, length: int, way: Callable[..., Any]) -> Case:
    """The row of a loop of `length` steps. The length is static, or only bounded."""
    step, arguments = STEPS[name]
    runs: dict[str, Run] = {SCAN: in_scan(step, length)}
    for library, prefix in ((ours, ""), (equinox_loops, f"{EQUINOX} ")):
        runs[f"{prefix}scan, checkpointed"] = scanned(library, "checkpointed", step, length)
        for kind in ("checkpointed", "bounded"):
            runs[f"{prefix}while_loop, {kind}"] = whiled(library, kind, step, length, length)
    return case(f"{way.__name__}, {name}, {length} steps", way, runs, arguments)


def few_of_many(length: int, most: int) -> Case:
    """The row of a loop that ends long before its limit."""
    step, arguments = STEPS["64-wide tanh"]
    runs = {SCAN: in_scan(step, length), MASKED: masked(step, length, most)}
    for library, prefix in ((ours, ""), (equinox_loops, f"{EQUINOX} ")):
        column = f"{prefix}while_loop, checkpointed"
        runs[column] = whiled(library, "checkpointed", step, length, most)
    return case(f"gradient, 64-wide tanh, {length} of {most} steps", gradient, runs, arguments)


def batch(number: int, most: int, way: Callable[..., Any]) -> Case:
    """The row of a batch of loops of different lengths."""
    lengths = jr.randint(jr.key(1), (number,), most // 10, most)
    carries = jr.normal(jr.key(2), (number, 64))

    def over_batch(loop: Callable[[Any], Run]) -> Run:
        def one(parameters: Any, carry: Any, length: Any) -> Any:
            return loop(length)(parameters, carry)

        return lambda parameters, carry: jax.vmap(one, (None, 0, 0))(parameters, carry, lengths)

    def by(library: Library, kind: str) -> Run:
        return over_batch(lambda length: whiled(library, kind, recurrent, length, most))

    if way is forward:
        runs = {WHILE: over_batch(lambda length: of_jax(recurrent, length))}
    else:
        runs = {MASKED: over_batch(lambda length: masked(recurrent, length, most))}
    runs["while_loop, checkpointed"] = by(ours, "checkpointed")
    runs["while_loop, bounded"] = by(ours, "bounded")
    runs[f"{EQUINOX} while_loop, checkpointed"] = by(equinox_loops, "checkpointed")
    name = f"{way.__name__}, {number} recurrences of up to {most} steps"
    return case(name, way, runs, (WEIGHTS, carries))


def writing(length: int, width: int, number: int, way: Callable[..., Any]) -> Case:
    """The row of a batch of loops that write a buffer row by row."""

    def in_rows(parameters: Any, carry: Any) -> Any:
        def body(carry: Any, _: None) -> tuple[Any, Any]:
            carry = jnp.tanh(parameters * carry) + 0.1
            return carry, carry

        return jax.lax.scan(body, carry, None, length)[1]

    def by(library: Library, kind: str) -> Run:
        def run(parameters: Any, carry: Any) -> Any:
            def body(state: Any) -> Any:
                index, carry, buffer = state
                carry = jnp.tanh(parameters * carry) + 0.1
                return index + 1, carry, buffer.at[index].set(carry)

            return library().while_loop(
                lambda state: state[0] < length,
                body,
                (jnp.array(0), carry, jnp.zeros((length, width))),
                max_steps=length,
                buffers=lambda state: state[2],
                kind=kind,
            )[2]

        return run

    runs = {
        SCAN: in_rows,
        "while_loop, checkpointed": by(ours, "checkpointed"),
        "while_loop, bounded": by(ours, "bounded"),
        f"{EQUINOX} while_loop, checkpointed": by(equinox_loops, "checkpointed"),
    }
    over_batch = {
        column: functools.partial(jax.vmap, in_axes=(None, 0))(run) for column, run in runs.items()
    }
    name = f"{way.__name__}, {number} loops that write {length} x {width} values"
    carries = jr.normal(jr.key(3), (number, width))
    return case(name, way, over_batch, (0.9 * jnp.ones(width), carries))


ROWS: tuple[Case, ...] = (
    *(
        recurrence(name, length, way)
        for way in (gradient, forward)
        for name, length in (("scalar", 1000), ("64-wide tanh", 1000), ("64-wide tanh", 10_000))
    ),
    few_of_many(100, 10_000),
    batch(64, 1000, forward),
    batch(64, 1000, gradient),
    writing(1000, 16, 16, forward),
    writing(1000, 16, 16, gradient),
)


def notes_of(calls: Mapping[str, Compiled]) -> list[str]:
    """The memory of each column; the time to trace and compile it, and its ratio to Equinox's."""
    memory = [f"{column} {call.temporary_bytes:,}" for column, call in calls.items()]
    seconds: dict[str, list[float]] = {column: [] for column in calls}
    for _ in range(FIRST_CALLS):
        for column, call in calls.items():
            seconds[column].append(call.seconds_to_compile())
    found = []
    for column, own in seconds.items():
        theirs = seconds.get(f"{EQUINOX} {column}")
        ratio = "" if theirs is None else f" ({statistics.median(map(truediv, own, theirs)):.2f})"
        found.append(f"{column} {1000 * statistics.median(own):.0f}{ratio}")
    return [
        f"temporary bytes: {', '.join(memory)}",
        f"first call, ms (ratio to {EQUINOX}): {', '.join(found)}",
    ]


def main(arguments: Sequence[str] | None = None, rows: Sequence[Case] = ROWS) -> int:
    """Measures and prints. Returns 2 for a wrong argument and 130 after Ctrl-C."""
    return command.measure_cases(arguments, NAME, __doc__, ROUNDS, rows, notes_of=notes_of)


if __name__ == "__main__":
    sys.exit(main())
