"""First calls, from a new function to its result: an Adam step, and arguments and results with many
leaves.

Each round uses new leaves, so that no cache of an earlier round is used.
"""

import functools
import importlib
import itertools
from collections.abc import Callable
from typing import Any

import jax

import eqxlike
from benchmarks import columns, networks
from benchmarks.cases import Case
from benchmarks.edge_models import Chain, layers
from benchmarks.layer_rows import Row, Table, check_first_calls
from benchmarks.layer_timing import Prepare
from benchmarks.timing import Call

STEPS = Table("First call of a training step", is_first_call=True)
MANY_LEAVES = Table("First call with many leaves", is_first_call=True)
BUILDING = Table("Layers built first in a process", is_first_call=True)

JAX = "jax.jit"

Wrap = Callable[[Callable[..., Any]], Callable[..., Any]]


def compare(table: Table, name: str, prepare: Callable[[Wrap], Call], jit: Wrap | None) -> Row:
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
        columns.OURS: lambda: preparing(eqxlike.filter_jit),
        columns.EQUINOX: lambda: preparing(importlib.import_module("equinox").filter_jit),
    }
    if jit is not None:
        builders = {JAX: lambda: preparing(jit), **builders}
    baseline = columns.EQUINOX if table is MANY_LEAVES else JAX
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

    return compare(STEPS, f"Adam step, depth {depth}", prepare, jax.jit)


def static_leaves_in(count: int) -> Row:
    """The first call of a function with a tuple of `count` static integers as argument."""
    starts = itertools.count(step=count)

    def prepare(wrap: Wrap) -> Call:
        start = next(starts)
        statics, x = tuple(range(start, start + count)), networks.normal(8, seed=1)
        return lambda: wrap(lambda statics, x: x * len(statics))(statics, x)

    jit = functools.partial(jax.jit, static_argnums=0)
    return compare(MANY_LEAVES, f"{count} static leaves in", prepare, jit)


def static_leaves_out(count: int) -> Row:
    """The first call of a function that returns a tuple of `count` static integers."""
    starts = itertools.count(step=count)

    def prepare(wrap: Wrap) -> Call:
        start, x = next(starts), networks.normal(8, seed=1)
        return lambda: wrap(lambda x: (x + 1.0, tuple(range(start, start + count))))(x)[0]

    return compare(MANY_LEAVES, f"{count} static leaves out", prepare, None)


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

    return compare(MANY_LEAVES, f"dict of {count} arrays", prepare, jax.jit)


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


def rows() -> list[Row]:
    """The rows of first calls."""
    return [
        *map(adam_step, (2, 8, 64)),
        static_leaves_in(100_000),
        dict_of_arrays(5_000),
        static_leaves_out(20_000),
        layers_of_many_shapes(16),
    ]
