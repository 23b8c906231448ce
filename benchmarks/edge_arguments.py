"""Warm calls with arguments that are not eqxlike Modules, from Python, JAX and other libraries.

The function of a row uses two of the arrays and returns one, so that a row measures only the cost
of passing the argument. The baseline is `jax.jit` on the same tree. If `jax.jit` refuses a static
leaf, the baseline passes it with `static_argnums`, or passes only the arrays.
"""

import collections
import dataclasses
import functools
import importlib
import importlib.util
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

import eqxlike
from benchmarks import cases, networks
from benchmarks.cases import Case, Work, check_agreement
from benchmarks.command import Row
from benchmarks.report import Table
from benchmarks.timing import Call

TABLE = Table("Arguments of other kinds", ("completion", "dispatch"), unit="microseconds")

TREE = "jax.jit, same tree"
WIDTH = 8
MANY = 100


def on_tree(work: Work, static_argnums: Sequence[int] = ()) -> Call:
    """`jax.jit` on the same tree. Arguments in `static_argnums` are static."""
    compiled = jax.jit(work.function, static_argnums=static_argnums)
    return cases.bind(work, compiled, work.state)


def row(
    name: str,
    make: Callable[[Any], Work],
    on_tree: Callable[[Work], Call] = on_tree,
) -> Row:
    """The row that calls a function in all ways.

    **Arguments:**

    - `name`: the name of the row.
    - `make`: returns the function and its arguments for a library. Raises ImportError if another
      library is not installed.
    - `on_tree`: makes the call with `jax.jit`.
    """
    builders: dict[str, Callable[[], Call]] = {
        cases.FLAT: lambda: cases.on_flat_list(make(eqxlike)),
        TREE: lambda: on_tree(make(eqxlike)),
        cases.OURS: lambda: cases.filtered(make(eqxlike)),
        cases.EQUINOX: lambda: cases.filtered(make(importlib.import_module("equinox"))),
    }
    return Row(TABLE, Case(name, builders, TREE), check_agreement)


def vectors(count: int) -> list[jax.Array]:
    """`count` arrays of `WIDTH` numbers."""
    return [networks.normal(WIDTH, seed=2 + index) for index in range(count)]


def ends(tree: Any, x: jax.Array) -> jax.Array:
    """Adds the first and the last array of any tree to an example."""
    leaves = jax.tree_util.tree_leaves(tree)
    return x + leaves[0] + leaves[-1]


def on_example(
    function: Callable[..., Any], make: Callable[[], Any], feeds_back: bool = False
) -> Callable[[Any], Work]:
    """A function that makes, for a library, the `Work` of a function of a tree and an example."""

    def work(library: Any) -> Work:
        example = networks.normal(WIDTH, seed=1)
        return Work(library, function, (make(),), (example,), feeds_back)

    return work


def tree_row(name: str, make: Callable[[], Any]) -> Row:
    """The row of `ends` on a tree."""
    return row(name, on_example(ends, make))


@functools.cache
def struct() -> type:
    """A Flax class with two fields."""
    flax_struct = importlib.import_module("flax.struct")

    @flax_struct.dataclass
    class Struct:
        scale: jax.Array
        shift: jax.Array

    return Struct


@functools.partial(jax.tree_util.register_dataclass, data_fields=["scale", "shift"], meta_fields=[])
@dataclasses.dataclass
class Registered:
    """A dataclass that is registered as a pytree with JAX."""

    scale: jax.Array
    shift: jax.Array


def pairs(make: Callable[[jax.Array, jax.Array], Any], count: int) -> list[Any]:
    """`count` objects of two arrays each."""
    arrays = vectors(2 * count)
    return [make(scale, shift) for scale, shift in zip(arrays[::2], arrays[1::2], strict=True)]


def nested_dict(depth: int, arrays: int) -> dict[str, Any]:
    """Nested dicts of this depth. The innermost dicts contain an array."""
    tree: dict[str, Any] = {}
    for array in [*vectors(arrays), *[None] * (depth - arrays)]:
        tree = {"inner": tree} if array is None else {"array": array, "inner": tree}
    return tree


def layer_arrays(count: int = 8) -> dict[str, dict[str, jax.Array]]:
    """The weights of layers, with the names of Flax's linen."""
    arrays = vectors(2 * count)
    return {
        f"Dense_{index}": {"kernel": kernel, "bias": bias}
        for index, (kernel, bias) in enumerate(zip(arrays[::2], arrays[1::2], strict=True))
    }


def nnx_state() -> Any:
    """The state of an MLP of Flax's NNX with eight layers."""
    nnx = importlib.import_module("flax.nnx")
    linears = [nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(index)) for index in range(8)]
    return nnx.state(nnx.Sequential(*linears))


def nnx_ends(state: Any, x: jax.Array) -> jax.Array:
    """Adds the first bias and the last one to an example."""
    biases = jax.tree_util.tree_leaves(state)[::2]
    return x + biases[0] + biases[-1]


def train_state() -> Any:
    """Flax's training state for eight layers and Adam. The step is an array."""
    module = importlib.import_module("flax.training.train_state")
    optimiser = optax.adam(networks.LEARNING_RATE)
    state = module.TrainState.create(apply_fn=ends, params=layer_arrays(), tx=optimiser)
    return state.replace(step=jnp.asarray(0))


def count_step(state: Any, x: jax.Array) -> tuple[Any, jax.Array]:
    """The state after the next step, and the example plus two parameters."""
    return state.replace(step=state.step + 1), ends(state.params, x)


def scale_and_shift(scale: jax.Array, shift: jax.Array, x: jax.Array) -> jax.Array:
    """An affine map of an example."""
    return scale * x + shift


class Settings:
    """A static object that is compared by identity. Its contents do not affect the program."""

    def __init__(self) -> None:
        self.table = {f"entry{index}": 0.5 * index for index in range(MANY)}


def static_row(name: str, function: Callable[..., jax.Array], value: Any) -> Row:
    """The row of a function whose first argument is static."""
    on_static_tree = functools.partial(on_tree, static_argnums=(0,))
    return row(name, on_example(function, lambda: value), on_static_tree)


def named_row(name: str, function: Callable[..., jax.Array]) -> Row:
    """The row of a function that is called with four keyword arguments."""

    def make(library: Any) -> Work:
        first, second, third, x = vectors(4)
        arrays = {"first": first, "second": second, "third": third, "x": x}
        return Work(library, function, (), (), kwargs=arrays)

    return row(name, make)


def plain_rows() -> list[Row]:
    """The rows with arguments from Python and JAX."""
    halve = functools.partial(lambda factor, x: factor * x, 0.5)
    holder = functools.partial(scale_and_shift, *vectors(2))
    by_jax = jax.tree_util.Partial(scale_and_shift, *vectors(2))

    def ordered_dict() -> Any:
        named = ((f"array{index}", each) for index, each in enumerate(vectors(16)))
        return collections.OrderedDict(named)

    def call(function: Callable[[jax.Array], jax.Array], x: jax.Array) -> jax.Array:
        return function(x)

    def add_static(number: float, x: jax.Array) -> jax.Array:
        return x + (1.0 if math.isnan(number) else number)

    def add_entry(settings: Settings, x: jax.Array) -> jax.Array:
        return x + settings.table["entry1"]

    def add_named(*, first: jax.Array, second: jax.Array, third: jax.Array, x: jax.Array):
        return x + first + second + third

    def add_any(**arrays: jax.Array) -> jax.Array:
        return functools.reduce(jnp.add, arrays.values())

    return [
        tree_row("list of 100 registered dataclasses", lambda: pairs(Registered, MANY)),
        tree_row("dict 100 deep, 1 array", lambda: nested_dict(MANY, 1)),
        tree_row("dict 100 deep, 100 arrays", lambda: nested_dict(MANY, MANY)),
        tree_row("OrderedDict of 16 arrays", ordered_dict),
        row("jax.tree_util.Partial of 2 arrays", on_example(call, lambda: by_jax)),
        static_row("functools.partial, static", call, halve),
        static_row("functools.partial of 2 arrays, static", call, holder),
        static_row("static object with a dict of 100", add_entry, Settings()),
        static_row("static 0.5", add_static, 0.5),
        static_row("static 0.0", add_static, 0.0),
        static_row("static nan", add_static, math.nan),
        named_row("keyword arguments", add_named),
        named_row("**kwargs", add_any),
    ]


def flax_rows() -> list[Row]:
    """The rows with arguments from Flax."""

    def frozen_dict() -> Any:
        return importlib.import_module("flax.core").FrozenDict(layer_arrays())

    def parameter_ends(state: Any, x: jax.Array) -> jax.Array:
        return ends(state.params, x)

    return [
        tree_row("one flax struct", lambda: pairs(struct(), 1)[0]),
        tree_row("list of 100 flax structs", lambda: pairs(struct(), MANY)),
        tree_row("flax FrozenDict, 8 layers", frozen_dict),
        row("nnx.State, 8 layers", on_example(nnx_ends, nnx_state)),
        row("flax TrainState, 8 layers", on_example(parameter_ends, train_state)),
        row(
            "flax TrainState, 8 layers, in and out",
            on_example(count_step, train_state, feeds_back=True),
        ),
    ]


def equinox_rows() -> list[Row]:
    """The rows with arguments from Equinox."""

    def mlp() -> Any:
        return networks.mlp(importlib.import_module("equinox"), WIDTH, 8)

    return [row("Equinox MLP, depth 8", on_example(networks.forward, mlp), cases.on_module)]


def rows() -> list[Row]:
    """The rows whose libraries are installed."""
    peers = {"flax": flax_rows, "equinox": equinox_rows}
    installed = [make() for name, make in peers.items() if importlib.util.find_spec(name)]
    return [*itertools.chain(*installed), *plain_rows()]
