"""What the main table leaves out: first calls, large and mutable models, no `jit`, and memory.

`python -m benchmarks.jit_edges [--json FILE] [--rounds N]`. The rows of warm calls are measured
as those of `benchmarks.jit_overhead`. A first call, from a new function to its result, cannot be
repeated: it is timed once for each way in each round, and the ratio is the median over the rounds.
"""

import argparse
import functools
import pathlib
import statistics
import sys
import time
import tracemalloc
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

import eqxlike
from benchmarks import columns, networks, report, table
from benchmarks.cases import Case, build, check_agreement
from benchmarks.columns import Work
from eqxlike._timing import Call, measure

ROUNDS = 100
FIRST_ROUNDS = 15

JAX = "jax"
OURS_OUTSIDE = "filtered"


class Layer(eqxlike.Module):
    """An affine map with a ReLU, without static parts."""

    weight: jax.Array
    bias: jax.Array

    def __call__(self, x: jax.Array) -> jax.Array:
        """Apply the layer to one example."""
        return jax.nn.relu(self.weight @ x + self.bias)


class Chain(eqxlike.Module):
    """Layers one after the other, held in any container."""

    layers: Any

    def __call__(self, x: jax.Array) -> jax.Array:
        """Apply the layers to one example."""
        layers = self.layers.values() if isinstance(self.layers, dict) else self.layers
        for layer in layers:
            x = layer(x)
        return x


class Wide(eqxlike.Module):
    """Many arrays, of which the call uses two: dispatch and nothing else."""

    layers: tuple[Layer, ...]

    def __call__(self, x: jax.Array) -> jax.Array:
        """Add the first and the last bias to one example."""
        return x + self.layers[0].bias + self.layers[-1].bias


def layers(depth: int, width: int) -> list[Layer]:
    """Return `depth` layers of `width` features."""
    arrays = networks.weights([width] * (depth + 1))
    pairs = zip(arrays[::2], arrays[1::2], strict=True)
    return [Layer(jnp.asarray(weight), jnp.asarray(bias)) for weight, bias in pairs]


def warm(name: str, model: eqxlike.Module, width: int) -> Case:
    """Return the case that calls `model`, which has no static leaves, on one example."""
    work = Work(eqxlike, networks.forward, (model,), (networks.normal(width, seed=1),), False)
    builders: dict[str, Callable[[], Call]] = {
        columns.FLAT: lambda: columns.on_flat_list(work),
        columns.MODULE: lambda: columns.on_module(work),
        columns.OURS: lambda: columns.filtered(work),
    }
    return Case(name, builders)


def outside(name: str, plain: Callable[..., Any], filtered: Callable[..., Any]) -> Case:
    """Return the case that calls a transformed function outside `jit`."""
    model, x = Chain(tuple(layers(2, 8))), networks.normal(8, seed=1)

    def call(function: Callable[..., Any]) -> Call:
        return lambda: jax.tree_util.tree_leaves(function(model, x))[0]

    return Case(name, {JAX: lambda: call(plain), OURS_OUTSIDE: lambda: call(filtered)}, JAX)


def total(model: Chain, x: jax.Array) -> jax.Array:
    """Return a scalar of a model and an example."""
    return jnp.sum(model(x))


def scaled(model: Chain, x: jax.Array) -> jax.Array:
    """Return something for `vmap` over both arguments."""
    return x * model.layers[0].bias


def warm_cases() -> list[Case]:
    """Return the rows of warm calls."""
    names = [f"layer{index}" for index in range(8)]
    return [
        warm("1000 arrays", Wide(tuple(layers(500, 4))), 4),
        warm("list of 2 layers", Chain(layers(2, 8)), 8),
        warm("list of 64 layers", Chain(layers(64, 8)), 8),
        warm("dict of 8 layers", Chain(dict(zip(names, layers(8, 8), strict=True))), 8),
        outside("grad outside jit", jax.grad(total), eqxlike.filter_grad(total)),
        outside(
            "value_and_grad outside jit",
            jax.value_and_grad(total),
            eqxlike.filter_value_and_grad(total),
        ),
        outside("vmap outside jit", jax.vmap(scaled), eqxlike.filter_vmap(scaled)),
    ]


def first_call_s(wrap: Callable[..., Any], arguments: Sequence[Any]) -> float:
    """Return the seconds from a new function to the result of its first call."""

    def step(*arguments: Any) -> Any:
        return networks.training_step(eqxlike, networks.mean_squared_error)(*arguments)

    start_s = time.perf_counter()
    jax.block_until_ready(jax.tree_util.tree_leaves(wrap(step)(*arguments)))
    return time.perf_counter() - start_s


def first_calls(depth: int, rounds: int = FIRST_ROUNDS) -> tuple[float, float, float]:
    """Return the seconds of a first call of an Adam step by `jax.jit` and `filter_jit`, and the
    median of the ratios.
    """
    model = Chain(tuple(layers(depth, 8)))
    state = networks.training_state(eqxlike, model)
    arguments = (*state, networks.normal(32, 8, seed=1), networks.normal(32, 8, seed=2))
    # Nothing of an earlier round may be kept on the model.
    fresh = functools.partial(jax.tree_util.tree_map, lambda leaf: leaf)
    plain, filtered = [], []
    for number in range(rounds + 1):
        order = [(jax.jit, plain), (eqxlike.filter_jit, filtered)]
        for wrap, times in order if number % 2 else order[::-1]:
            times.append(first_call_s(wrap, fresh(arguments)))
    # The first round also pays for what JAX sets up once.
    ratios = [own / base for own, base in zip(filtered[1:], plain[1:], strict=True)]
    medians = statistics.median(plain[1:]), statistics.median(filtered[1:])
    return (*medians, statistics.median(ratios))


def partition_bytes(depth: int, copies: int = 100) -> float:
    """Return the bytes that keeping its partition adds to a model with `2 * depth` arrays."""
    call = eqxlike.filter_jit(lambda model: model.layers[0].bias)
    model = Chain(tuple(layers(depth, 8)))
    call(model)
    models = [jax.tree_util.tree_map(lambda leaf: leaf, model) for _ in range(copies)]
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    outcomes = [call(each) for each in models]
    del outcomes
    after, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return (after - before) / copies


def long_work(model: Layer, x: jax.Array, steps: int) -> jax.Array:
    """Apply a layer again and again: work for the device and none for Python."""
    return jax.lax.fori_loop(0, steps, lambda _, x: model(x), x)


def asynchrony(target_s: float = 1.0) -> tuple[float, float]:
    """Return the seconds until a call of `filter_jit` on about `target_s` of work returns, and
    until its result is ready; medians of five.
    """
    (model,) = layers(1, 256)
    x = networks.normal(256, seed=1)
    call = eqxlike.filter_jit(long_work)
    first = 20_000
    steps = jnp.asarray(first)
    start_s = time.perf_counter()
    for _ in range(2):  # The second time it is compiled.
        start_s = time.perf_counter()
        jax.block_until_ready(call(model, x, steps))
    steps = jnp.asarray(int(first * target_s / (time.perf_counter() - start_s)))
    returned, ready = [], []
    for _ in range(5):
        start_s = time.perf_counter()
        result = call(model, x, steps)
        returned.append(time.perf_counter() - start_s)
        jax.block_until_ready(result)
        ready.append(time.perf_counter() - start_s)
    return statistics.median(returned), statistics.median(ready)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.jit_edges", description=__doc__)
    parser.add_argument("--json", type=pathlib.Path, metavar="FILE", help="write all numbers there")
    parser.add_argument("--rounds", type=int, default=ROUNDS, metavar="N", help=f"default {ROUNDS}")
    parser.add_argument(
        "--first-rounds", type=int, default=FIRST_ROUNDS, metavar="N", help="of first calls"
    )
    options = parser.parse_args(arguments)
    result = report.new_report({"rounds": options.rounds})
    for case in warm_cases():
        calls, notes = build(case)
        check_agreement(calls)
        measured = measure(calls, baseline=case.baseline, rounds=options.rounds)
        result["rows"].append(report.row(case.name, measured, notes))
    result["is_complete"] = True
    result["first_calls"], result["partition_bytes"] = {}, {}
    for depth in (2, 8, 64):
        plain_s, filtered_s, ratio = first_calls(depth, options.first_rounds)
        result["first_calls"][str(depth)] = {
            "jax.jit": plain_s,
            "filter_jit": filtered_s,
            "ratio": ratio,
        }
        result["partition_bytes"][str(depth)] = partition_bytes(depth)
    returned_s, ready_s = asynchrony()
    result["asynchrony"] = {"returned_s": returned_s, "ready_s": ready_s}
    if options.json is not None:
        report.write(result, options.json)
    print(table.render(result, markdown=False))
    print("\nFirst call of an Adam step, until its result is ready (seconds; median of ratios)\n")
    print(table.text_table(first_call_rows(result["first_calls"])))
    print("\nMemory that a kept partition adds to a model (bytes)\n")
    sizes = [
        [f"{2 * int(depth)} arrays", f"{size:.0f}"]
        for depth, size in result["partition_bytes"].items()
    ]
    print(table.text_table([["", "bytes"], *sizes]))
    print(f"\nA call on {ready_s:.3f} s of work returned after {1e3 * returned_s:.3f} ms")
    return 0


def first_call_rows(calls: dict[str, dict[str, float]]) -> list[list[str]]:
    """Return the cells of the table of first calls, headings first."""
    rows = [["", "jax.jit", "filter_jit", "ratio"]]
    for depth, numbers in calls.items():
        cells = [f"{numbers[name]:.3f}" for name in ("jax.jit", "filter_jit", "ratio")]
        rows.append([f"depth {depth}", *cells])
    return rows


if __name__ == "__main__":
    sys.exit(main())
