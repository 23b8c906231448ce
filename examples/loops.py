"""Compares different kinds of loops: their programs, and their cost to compile and to run.

The same computation, `x -> tanh(weight @ x)` repeated, is written as a Python loop, as
`jax.lax.scan` (also unrolled), `fori_loop` and `while_loop`, as eqxlike's loops, with a branch in
each iteration, and as nested loops. For each loop, a table shows how many operations JAX traced,
how many remain after XLA, and how long tracing and compiling takes. It also shows how long a call
of the loop takes, and how long a call of its gradient takes, if JAX can compute the gradient.
`--graph NAME` prints the traced program of one loop.
"""

import argparse
import functools
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Jaxpr, jaxprs_in_params

import eqxlike as eqx
from benchmarks.timing import measure
from eqxlike._check_numbers import whole_number_in
from eqxlike._tables import align

TURNS, WIDTH, ROUNDS = 64, 32, 50
QUICK_TURNS, QUICK_ROUNDS = 4, 2
BASELINE = "scan"

Loop = Callable[[jax.Array, jax.Array], jax.Array]


def turn(weight: jax.Array, x: jax.Array) -> jax.Array:
    return jnp.tanh(weight @ x)


def of_python(turns: int, weight: jax.Array, x: jax.Array) -> jax.Array:
    for _ in range(turns):
        x = turn(weight, x)
    return x


def of_scan(turns: int, weight: jax.Array, x: jax.Array, unroll: int = 1) -> jax.Array:
    def body(x: jax.Array, _: None) -> tuple[jax.Array, None]:
        return turn(weight, x), None

    return lax.scan(body, x, length=turns, unroll=unroll)[0]


def of_fori_loop(turns: int, weight: jax.Array, x: jax.Array) -> jax.Array:
    return lax.fori_loop(0, turns, lambda _, x: turn(weight, x), x)


def of_while_loop(turns: int, weight: jax.Array, x: jax.Array) -> jax.Array:
    def body(carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        count, x = carry
        return count + 1, turn(weight, x)

    return lax.while_loop(lambda carry: carry[0] < turns, body, (jnp.zeros((), int), x))[1]


def of_checkpointed(turns: int, weight: jax.Array, x: jax.Array) -> jax.Array:
    def body(carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        count, x = carry
        return count + 1, turn(weight, x)

    return eqx.loops.while_loop(
        lambda carry: carry[0] < turns,
        body,
        (jnp.zeros((), int), x),
        max_steps=turns,
        kind="checkpointed",
    )[1]


def of_scan_with_cond(turns: int, weight: jax.Array, x: jax.Array) -> jax.Array:
    def body(x: jax.Array, index: jax.Array) -> tuple[jax.Array, None]:
        return lax.cond(index % 2 == 0, turn, lambda weight, x: -x, weight, x), None

    return lax.scan(body, x, jnp.arange(turns))[0]


def of_scan_with_where(turns: int, weight: jax.Array, x: jax.Array) -> jax.Array:
    def body(x: jax.Array, index: jax.Array) -> tuple[jax.Array, None]:
        return jnp.where(index % 2 == 0, turn(weight, x), -x), None

    return lax.scan(body, x, jnp.arange(turns))[0]


def of_scan_in_scan(turns: int, weight: jax.Array, x: jax.Array) -> jax.Array:
    def body(x: jax.Array, _: None) -> tuple[jax.Array, None]:
        return of_scan(4, weight, x), None

    return lax.scan(body, x, length=turns // 4)[0]


LOOPS: dict[str, Callable[..., jax.Array]] = {
    "Python": of_python,
    BASELINE: of_scan,
    "scan, unroll=4": functools.partial(of_scan, unroll=4),
    "fori_loop": of_fori_loop,
    "while_loop": of_while_loop,
    "eqxlike, checkpointed": of_checkpointed,
    "scan with cond": of_scan_with_cond,
    "scan with where": of_scan_with_where,
    "scan in scan": of_scan_in_scan,
}
GRADIENT = ", gradient"
WITHOUT_GRADIENT = {"while_loop"}
"""JAX has no reverse mode for a loop whose number of iterations is known only at run time."""


def loop(name: str, turns: int) -> Loop:
    """The loop called `name`, as a new function of `weight` and `x` that is not compiled yet."""
    return functools.partial(LOOPS[name], turns)


def arguments_of(width: int) -> tuple[jax.Array, jax.Array]:
    key1, key2 = jax.random.split(jax.random.key(0))
    return jax.random.normal(key1, (width, width)) / width**0.5, jax.random.normal(key2, (width,))


def count_operations(jaxpr: Jaxpr) -> int:
    """The number of operations in a program; operations of inner programs count once."""
    inner = [
        count_operations(each)
        for equation in jaxpr.eqns
        for each in jaxprs_in_params(equation.params)
    ]
    return len(jaxpr.eqns) + sum(inner)


def count_compiled(text: str) -> int:
    """The number of instructions of a compiled program, without parameters and constants."""
    instructions = [line for line in text.splitlines() if " = " in line]
    return sum("parameter(" not in line and "constant(" not in line for line in instructions)


def gradient_of(function: Loop) -> Callable[[jax.Array, jax.Array], Any]:
    return jax.grad(lambda weight, x: jnp.sum(function(weight, x) ** 2))


def compiled_in_ms(function: Callable[..., Any], *args: Any) -> tuple[Any, float]:
    """The compiled program, and the milliseconds that tracing and compiling took."""
    start_s = time.perf_counter()
    compiled = jax.jit(lambda *args: function(*args)).lower(*args).compile()
    return compiled, 1e3 * (time.perf_counter() - start_s)


def table(turns: int, rounds: int) -> str:
    """The table of all loops."""
    args = arguments_of(WIDTH)
    rows: list[list[str]] = []
    programs: dict[str, Any] = {}
    for name in LOOPS:
        function = loop(name, turns)
        traced = count_operations(jax.make_jaxpr(function)(*args).jaxpr)
        programs[name], compiling_ms = compiled_in_ms(function, *args)
        left = count_compiled(programs[name].as_text())
        gradient_ms = None
        if name not in WITHOUT_GRADIENT:
            program, gradient_ms = compiled_in_ms(gradient_of(function), *args)
            programs[name + GRADIENT] = program
        rows.append([name, f"{traced:,}", f"{left:,}", f"{compiling_ms:.0f}", _shown(gradient_ms)])
    calls = {name: functools.partial(each, *args) for name, each in programs.items()}
    columns = measure(calls, baseline=BASELINE, rounds=rounds).columns
    for row in rows:
        for name in (row[0], row[0] + GRADIENT):
            row.append(_shown(columns[name].completion_us if name in columns else None))
    header = ("Loop", "Traced", "Compiled", "Compile, ms", "Gradient's", "Call, us", "Gradient, us")
    return align(header, rows)


def _shown(number: float | None) -> str:
    return "-" if number is None else f"{number:,.0f}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures and prints; returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--turns", type=whole_number_in, metavar="N", help=f"iterations ({TURNS})")
    parser.add_argument("--graph", choices=LOOPS, metavar="NAME", help=f"one of {', '.join(LOOPS)}")
    parser.add_argument("--quick", action="store_true", help="a quick look; do not quote its times")
    options = parser.parse_args(arguments)
    turns = options.turns or (QUICK_TURNS if options.quick else TURNS)
    if options.graph is not None:
        print(jax.make_jaxpr(loop(options.graph, turns))(*arguments_of(WIDTH)))
        return 0
    print(table(turns, QUICK_ROUNDS if options.quick else ROUNDS))
    return 0


if __name__ == "__main__":
    # Disable the cache on disk, because reading a program from it compiles nothing.
    jax.config.update("jax_enable_compilation_cache", False)
    sys.exit(main())
