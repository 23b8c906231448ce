"""Other calls: large models, other arguments, exported programs, first calls; and memory.

A check before timing ensures that all columns of a row compute the same numbers.
`benchmarks.timing` describes the method. A first call, from a new function to its result, cannot be
repeated: it is timed without a compilation cache on disk. If all
rows are measured, memory and asynchrony follow. Ctrl-C prints the rows that are finished.
"""

import functools
import importlib
import itertools
import statistics
import sys
import time
import tracemalloc
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.export
import jax.numpy as jnp

import eqxlike
from benchmarks import cases, command, edge_arguments, networks, table
from benchmarks.cases import Case, Work, check_agreement, check_first_calls
from benchmarks.command import Row
from benchmarks.report import Table
from benchmarks.timing import Call, Prepare

NAME = "benchmarks.jit_edges"
ROUNDS = command.Rounds(default=100, quick=15)
FIRST_ROUNDS = command.Rounds(default=15, quick=2)


# --- warm calls: large models, lists and dicts inside, and no `jit` ---

MODELS = Table("Our Modules", ("completion", "dispatch"), unit="microseconds")
OUTSIDE = Table("Outside jit", unit="microseconds")

OUTSIDE_JAX, OUTSIDE_OURS = "jax", "filtered"


class Layer(eqxlike.Module):
    """An affine map with a ReLU, without static parts."""

    weight: jax.Array
    bias: jax.Array

    def __call__(self, x: jax.Array) -> jax.Array:
        """Applies the layer to one example."""
        return jax.nn.relu(self.weight @ x + self.bias)


class Chain(eqxlike.Module):
    """Layers in sequence, stored in any container."""

    layers: Any

    def __call__(self, x: jax.Array) -> jax.Array:
        """Applies the layers to one example."""
        layers = self.layers.values() if isinstance(self.layers, dict) else self.layers
        for layer in layers:
            x = layer(x)
        return x


class Wide(eqxlike.Module):
    """Many arrays. A call uses only two of them, so that it measures dispatch."""

    layers: tuple[Layer, ...]

    def __call__(self, x: jax.Array) -> jax.Array:
        """Adds the first and the last bias to one example."""
        return x + self.layers[0].bias + self.layers[-1].bias


def layers(depth: int, width: int) -> list[Layer]:
    """`depth` layers of `width` features."""
    arrays = networks.weights([width] * (depth + 1))
    pairs = zip(arrays[::2], arrays[1::2], strict=True)
    return [Layer(jnp.asarray(weight), jnp.asarray(bias)) for weight, bias in pairs]


def named_layers(depth: int, width: int) -> list[tuple[str, Layer]]:
    """Pairs of a name and a layer."""
    return [(f"layer{index}", layer) for index, layer in enumerate(layers(depth, width))]


def warm(name: str, make: Callable[[], eqxlike.Module], width: int) -> Row:
    """The row that calls a model without static leaves on one example."""

    @functools.cache
    def work() -> Work:
        example = networks.normal(width, seed=1)
        return Work(eqxlike, networks.forward, (make(),), (example,))

    builders: dict[str, Callable[[], Call]] = {
        cases.FLAT: lambda: cases.on_flat_list(work()),
        cases.MODULE: lambda: cases.on_module(work()),
        cases.OURS: lambda: cases.filtered(work()),
    }
    return Row(MODELS, Case(name, builders), check_agreement)


def outside(name: str, plain: Callable[..., Any], filtered: Callable[..., Any]) -> Row:
    """The row that calls a transformed function outside `jit`."""

    def call(function: Callable[..., Any]) -> Call:
        model, x = Chain(tuple(layers(2, 8))), networks.normal(8, seed=1)
        return lambda: jax.tree_util.tree_leaves(function(model, x))[0]

    builders = {OUTSIDE_JAX: lambda: call(plain), OUTSIDE_OURS: lambda: call(filtered)}
    return Row(OUTSIDE, Case(name, builders, OUTSIDE_JAX), check_agreement)


def total(model: Chain, x: jax.Array) -> jax.Array:
    """A scalar function of a model and an example."""
    return jnp.sum(model(x))


def scaled(model: Chain, x: jax.Array) -> jax.Array:
    """A function for `vmap` over both arguments."""
    return x * model.layers[0].bias


def warm_rows() -> list[Row]:
    """Warm calls of our Modules, and of transformed functions outside `jit`."""
    return [
        warm("1000 arrays", lambda: Wide(tuple(layers(500, 4))), 4),
        warm("list of 2 layers", lambda: Chain(layers(2, 8)), 8),
        warm("list of 64 layers", lambda: Chain(layers(64, 8)), 8),
        warm("dict of 8 layers", lambda: Chain(dict(named_layers(8, 8))), 8),
        outside("grad", jax.grad(total), eqxlike.filter_grad(total)),
        outside("value_and_grad", jax.value_and_grad(total), eqxlike.filter_value_and_grad(total)),
        outside("vmap", jax.vmap(scaled), eqxlike.filter_vmap(scaled)),
    ]


# --- warm calls of exported programs ---
#
# The floor is `jax.jit` of what `jax.export` alone reads back, on flat arrays. A dictionary
# replaces a Module if its class is unavailable.

EXPORTS = Table("Exported programs", ("completion", "dispatch"), unit="microseconds")

JAX_EXPORT = "jax.export, flat list"
EXPORTED = "Exported.call"


def by_jax(work: Work) -> Call:
    """The program of `jax.export`, called with all arrays in one list."""
    leaves, treedef = jax.tree_util.tree_flatten(eqxlike.filter(work.state, eqxlike.is_array))
    static = eqxlike.filter(work.state, eqxlike.is_array, inverse=True)

    def function(leaves: list[jax.Array], *data: jax.Array) -> Any:
        state = eqxlike.combine(jax.tree_util.tree_unflatten(treedef, leaves), static)
        return work.function(*state, *data)

    written = jax.export.export(jax.jit(function))(leaves, *work.data).serialize()
    read = jax.export.deserialize(bytearray(written))
    return functools.partial(jax.jit(read.call), leaves, *work.data)


def exported(work: Work, as_given: Callable[[Any], Any] = lambda state: state) -> Call:
    """The program of `eqxlike.export`."""
    program = eqxlike.export(work.function, *work.state, *work.data, dynamic=())
    return functools.partial(program.call, *map(as_given, work.state), *work.data)


def as_dictionaries(model: Any) -> dict[str, Any]:
    """The weights of an MLP as dictionaries, for a process without the classes."""
    layers = ({"weight": layer.weight, "bias": layer.bias} for layer in model.layers)
    return {"layers": tuple(layers)}


def exported_rows() -> list[Row]:
    """MLPs as part of the program, as arguments, and as dictionaries."""

    def mlp(depth: int, width: int, is_passed: bool) -> Work:
        model, x = networks.mlp(eqxlike, width, depth), networks.normal(width, seed=1)
        if is_passed:
            return Work(eqxlike, networks.forward, (model,), (x,))
        return Work(eqxlike, functools.partial(networks.forward, model), (), (x,))

    def row(name: str, make: Callable[[], Work], as_given: Any = lambda state: state) -> Row:
        builders: dict[str, Callable[[], Call]] = {
            JAX_EXPORT: lambda: by_jax(make()),
            cases.OURS: lambda: cases.filtered(make()),
            EXPORTED: lambda: exported(make(), as_given),
        }
        return Row(EXPORTS, Case(name, builders, JAX_EXPORT), check_agreement)

    return [
        row("MLP, 2 layers of 32, in the program", lambda: mlp(1, 32, False)),
        row("MLP, 2 layers of 32, passed", lambda: mlp(1, 32, True)),
        row("MLP, 64 layers of 8, passed", lambda: mlp(63, 8, True)),
        row(
            "MLP, 64 layers of 8, passed as dictionaries", lambda: mlp(63, 8, True), as_dictionaries
        ),
    ]


# --- first calls, from a new function to its result ---
#
# Each round uses new leaves, so that no cache of an earlier round is used.

STEPS = Table("First call of a training step", is_first_call=True)
MANY_LEAVES = Table("First call with many leaves", is_first_call=True)
BUILDING = Table("Layers built first in a process", is_first_call=True)

JAX = "jax.jit"

Wrap = Callable[[Callable[..., Any]], Callable[..., Any]]


def first_call(table: Table, name: str, prepare: Callable[[Wrap], Call], jit: Wrap | None) -> Row:
    """The row of a first call with all libraries.

    **Arguments:**

    - `table`: the table of the row.
    - `name`: the name of the row.
    - `prepare`: called with a function such as `jax.jit`. Returns the call of a new function with
      new arguments, which returns one array.
    - `jit`: `jax.jit` with options for this function, or None if `jax.jit` does not support it.
    """

    def preparing(wrap: Wrap) -> Prepare:
        return lambda: prepare(wrap)

    builders: dict[str, Callable[[], Prepare]] = {
        cases.OURS: lambda: preparing(eqxlike.filter_jit),
        cases.EQUINOX: lambda: preparing(importlib.import_module("equinox").filter_jit),
    }
    if jit is not None:
        builders = {JAX: lambda: preparing(jit), **builders}
    baseline = cases.EQUINOX if table is MANY_LEAVES else JAX
    return Row(table, Case(name, builders, baseline), check_first_calls)


def adam_step(depth: int) -> Row:
    """The first call of an Adam step of a chain of `depth` layers."""

    @functools.cache
    def state() -> tuple[Any, ...]:
        return networks.training_state(eqxlike, Chain(tuple(layers(depth, 8))))

    data = networks.normal(32, 8, seed=1), networks.normal(32, 8, seed=2)

    def prepare(wrap: Wrap) -> Call:
        def step(*arguments: Any) -> Any:
            return networks.training_step(eqxlike, networks.mean_squared_error)(*arguments)

        # The model must not have a cache from an earlier round.
        fresh = jax.tree_util.tree_map(lambda leaf: leaf, state())
        return lambda: wrap(step)(*fresh, *data)[-1]

    return first_call(STEPS, f"Adam step, depth {depth}", prepare, jax.jit)


def static_leaves_in(count: int) -> Row:
    """The first call of a function with a tuple of `count` static integers as argument."""
    starts = itertools.count(step=count)

    def prepare(wrap: Wrap) -> Call:
        start = next(starts)
        statics, x = tuple(range(start, start + count)), networks.normal(8, seed=1)
        return lambda: wrap(lambda statics, x: x * len(statics))(statics, x)

    jit = functools.partial(jax.jit, static_argnums=0)
    return first_call(MANY_LEAVES, f"{count} static leaves in", prepare, jit)


def static_leaves_out(count: int) -> Row:
    """The first call of a function that returns a tuple of `count` static integers."""
    starts = itertools.count(step=count)

    def prepare(wrap: Wrap) -> Call:
        start, x = next(starts), networks.normal(8, seed=1)
        return lambda: wrap(lambda x: (x + 1.0, tuple(range(start, start + count))))(x)[0]

    return first_call(MANY_LEAVES, f"{count} static leaves out", prepare, None)


def dict_of_arrays(count: int) -> Row:
    """The first call of a function of a dict of `count` arrays, which uses two of them."""

    @functools.cache
    def arrays() -> list[jax.Array]:
        return [networks.normal(8, seed=1 + index) for index in range(count)]

    def prepare(wrap: Wrap) -> Call:
        given = {f"array{index}": array for index, array in enumerate(arrays())}

        def ends(given: dict[str, jax.Array]) -> jax.Array:
            return given["array0"] + given[f"array{count - 1}"]

        return lambda: wrap(ends)(given)

    return first_call(MANY_LEAVES, f"dict of {count} arrays", prepare, jax.jit)


def layers_of_many_shapes(count: int) -> Row:
    """Building `count` layers of different shapes in a process where JAX has compiled nothing."""

    def preparing(library: str) -> Prepare:
        nn = importlib.import_module(f"{library}.nn")

        def build() -> jax.Array:
            keys = jax.random.split(jax.random.key(0), count)
            built = [
                nn.Linear(5 + 3 * index, 7 + 5 * index, key=key) for index, key in enumerate(keys)
            ]
            return built[-1].weight

        def prepare() -> Call:
            jax.clear_caches()
            return build

        return prepare

    builders = {
        "eqxlike": functools.partial(preparing, "eqxlike"),
        "Equinox": functools.partial(preparing, "equinox"),
    }
    return Row(BUILDING, Case(f"{count} shapes", builders, "Equinox"), check_first_calls)


def first_rows() -> list[Row]:
    """First calls of a step, of functions with many leaves, and of layers."""
    return [
        *map(adam_step, (2, 8, 64)),
        static_leaves_in(100_000),
        dict_of_arrays(5_000),
        static_leaves_out(20_000),
        layers_of_many_shapes(16),
    ]


# --- the memory of cached partitions, and the time until a call returns ---


def partition_bytes(depth: int, copies: int = 100) -> float:
    """The memory of the cached partition of a model with `2 * depth` arrays, in bytes."""
    call = eqxlike.filter_jit(lambda model: model.layers[0].bias)
    model = Chain(tuple(layers(depth, 8)))
    call(model)
    models = [jax.tree_util.tree_map(lambda leaf: leaf, model) for _ in range(copies)]
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    outputs = [call(each) for each in models]
    del outputs
    after, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return (after - before) / copies


def long_work(model: Layer, x: jax.Array, steps: jax.Array) -> jax.Array:
    """Applies a layer repeatedly on the device, without work for Python."""
    return jax.lax.fori_loop(0, steps, lambda _, x: model(x), x)


def asynchrony(target_s: float = 1.0) -> tuple[float, float]:
    """The seconds until a call of `filter_jit` returns, and until its result is ready.

    Both are medians of five calls that take about `target_s`.
    """
    (model,) = layers(1, 256)
    x = networks.normal(256, seed=1)
    call = eqxlike.filter_jit(long_work)
    first = 20_000
    steps = jnp.asarray(first)
    start_s = time.perf_counter()
    for _ in range(2):  # the second call is compiled
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


# --- the command ---


def all_rows() -> list[Row]:
    """All rows, starting with warm calls."""
    return [*warm_rows(), *edge_arguments.rows(), *exported_rows(), *first_rows()]


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures and prints. Returns 2 for a wrong argument and 130 after Ctrl-C."""
    options = command.parse(arguments, NAME, __doc__, ROUNDS, FIRST_ROUNDS)

    def finish(result: dict[str, Any]) -> None:
        if not options.rows:
            result.update(measure_resources())

    return command.measure_rows(NAME, options, all_rows(), finish, render)


def render(result: Mapping[str, Any], *, markdown: bool) -> str:
    """The tables of a report, and memory and asynchrony if they were measured."""
    text = table.render(result, markdown=markdown)
    return f"{text}\n{describe_resources(result)}" if "asynchrony" in result else text


def measure_resources() -> dict[str, Any]:
    """Measures the memory of cached partitions, and the time until a call returns."""
    returned_s, ready_s = asynchrony()
    return {
        "partition_bytes": {str(2 * depth): partition_bytes(depth) for depth in (2, 8, 64)},
        "asynchrony": {"returned_s": returned_s, "ready_s": ready_s},
    }


def describe_resources(measured: Mapping[str, Any]) -> str:
    """The output of `measure_resources` as text."""
    sizes = [
        [f"{count} arrays", f"{size:.0f}"] for count, size in measured["partition_bytes"].items()
    ]
    ready_s, returned_s = (measured["asynchrony"][name] for name in ("ready_s", "returned_s"))
    return (
        f"\nMemory that a cached partition adds to a model\n\n"
        f"{table.text_table([['', 'bytes'], *sizes])}\n\n"
        f"A call on {ready_s:.3f} s of work returned after {1e3 * returned_s:.3f} ms"
    )


if __name__ == "__main__":
    # With a cache on disk, a first call would compile nothing. The cache must be disabled before
    # JAX compiles its first program.
    jax.config.update("jax_enable_compilation_cache", False)
    sys.exit(main())
