"""Warm calls on arguments that are no Modules of ours: what other libraries and Python bring.

The function of a row uses two of the arrays and returns one, so that a row shows what it costs to
bring the argument into the call and nothing else. The baseline is `jax.jit` on the same tree. Where
`jax.jit` refuses a static leaf, the baseline gets it by `static_argnums`, or the arrays alone,
split off outside.
"""

import collections
import dataclasses
import functools
import importlib
import importlib.util
import itertools
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax

import eqxlike
from benchmarks import columns, networks
from benchmarks.cases import Case, check_agreement
from benchmarks.layer_rows import Row, Table
from eqxlike._timing import Call

TABLE = Table("Arguments of other kinds", ("completion", "dispatch"), unit="microseconds")

TREE = "jax.jit, same tree"
WIDTH = 8
MANY = 100


@dataclasses.dataclass(frozen=True)
class Arguments:
    """How a row calls its function.

    Attributes:
        function: returns one array; where `feeds_back`, its next first argument and one array.
        args: its positional arguments.
        kwargs: its arguments by name.
        static_argnums: the positions of the arguments that are static, for `jax.jit`.
        is_split: whether static leaves stand among the arrays, so that `jax.jit` gets the arrays
            alone.
        feeds_back: whether each call takes as its first argument what the last one returned.
    """

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    static_argnums: tuple[int, ...] = ()
    is_split: bool = False
    feeds_back: bool = False

    def bind(self, compiled: Callable[..., Any]) -> Call:
        """Return the call of a compiled function on these arguments, as they are."""
        if not self.feeds_back:
            return lambda: compiled(*self.args, **self.kwargs)
        state, *others = self.args

        def step() -> jax.Array:
            nonlocal state
            state, output = compiled(state, *others, **self.kwargs)
            return output

        return step


def filtered(library: Any, given: Arguments) -> Call:
    """The library's `filter_jit` on the arguments as they are."""
    return given.bind(library.filter_jit(given.function))


def on_tree(given: Arguments) -> Call:
    """`jax.jit` on the same tree, without what it refuses."""
    if not given.is_split:
        return given.bind(jax.jit(given.function, static_argnums=given.static_argnums))
    arrays, static = eqxlike.partition(given.args, eqxlike.is_array)
    compiled = jax.jit(lambda *arrays: given.function(*eqxlike.combine(arrays, static)))
    return dataclasses.replace(given, args=arrays).bind(compiled)


def on_flat_list(given: Arguments) -> Call:
    """`jax.jit` on a list of the first argument's arrays and one of all others: the floor."""
    tree = (given.args[:1], given.args[1:], dict(given.kwargs))
    arrays, static = eqxlike.partition(tree, eqxlike.is_array)
    first, first_treedef = jax.tree_util.tree_flatten(arrays[0])
    others, others_treedef = jax.tree_util.tree_flatten(arrays[1:])

    def function(first: list[jax.Array], others: list[jax.Array]) -> Any:
        arrays = first_treedef.unflatten(first), *others_treedef.unflatten(others)
        state, args, kwargs = eqxlike.combine(arrays, static)
        result = given.function(*state, *args, **kwargs)
        if not given.feeds_back:
            return result
        state, output = result
        return jax.tree_util.tree_leaves(eqxlike.filter(state, eqxlike.is_array)), output

    return dataclasses.replace(given, args=(first, others), kwargs={}).bind(jax.jit(function))


def row(name: str, make: Callable[[], Arguments]) -> Row:
    """Return the row that calls a function in all ways.

    Args:
        name: of the row.
        make: returns the function and its arguments; raises ImportError where a library is not
            installed.
    """
    builders: dict[str, Callable[[], Call]] = {
        columns.FLAT: lambda: on_flat_list(make()),
        TREE: lambda: on_tree(make()),
        columns.OURS: lambda: filtered(eqxlike, make()),
        columns.EQUINOX: lambda: filtered(importlib.import_module("equinox"), make()),
    }
    return Row(TABLE, Case(name, builders, TREE), check_agreement)


def example() -> jax.Array:
    """Return the example that each function gets beside its argument."""
    return networks.normal(WIDTH, seed=1)


def vectors(count: int) -> list[jax.Array]:
    """Return `count` arrays of `WIDTH` numbers."""
    return [networks.normal(WIDTH, seed=2 + index) for index in range(count)]


def ends(tree: Any, x: jax.Array) -> jax.Array:
    """Add the first and the last array of any tree to an example."""
    leaves = jax.tree_util.tree_leaves(tree)
    return x + leaves[0] + leaves[-1]


def of_tree(make: Callable[[], Any], is_split: bool = False) -> Callable[[], Arguments]:
    """Return what makes the arguments of `ends` for a tree."""
    return lambda: Arguments(ends, (make(), example()), is_split=is_split)


@functools.cache
def struct() -> type:
    """Return a class of Flax's with two fields."""
    flax_struct = importlib.import_module("flax.struct")

    @flax_struct.dataclass
    class Struct:
        scale: jax.Array
        shift: jax.Array

    return Struct


@functools.partial(jax.tree_util.register_dataclass, data_fields=["scale", "shift"], meta_fields=[])
@dataclasses.dataclass
class Registered:
    """A dataclass that is a pytree by JAX's own means."""

    scale: jax.Array
    shift: jax.Array


def pairs(kind: Callable[[jax.Array, jax.Array], Any], count: int) -> list[Any]:
    """Return `count` objects of two arrays each."""
    arrays = vectors(2 * count)
    return [kind(scale, shift) for scale, shift in zip(arrays[::2], arrays[1::2], strict=True)]


def nested_dict(depth: int, arrays: int) -> dict[str, Any]:
    """Return a dict that holds the next dict, `depth` deep, the innermost ones with an array."""
    tree: dict[str, Any] = {}
    for array in [*vectors(arrays), *[None] * (depth - arrays)]:
        tree = {"inner": tree} if array is None else {"array": array, "inner": tree}
    return tree


def layer_arrays(count: int = 8) -> dict[str, dict[str, jax.Array]]:
    """Return the weights of some layers as Flax's linen names them."""
    arrays = vectors(2 * count)
    return {
        f"Dense_{index}": {"kernel": kernel, "bias": bias}
        for index, (kernel, bias) in enumerate(zip(arrays[::2], arrays[1::2], strict=True))
    }


def frozen_dict() -> Any:
    """Return the weights of eight layers in Flax's frozen dict."""
    return importlib.import_module("flax.core").FrozenDict(layer_arrays())


def ordered_dict() -> Any:
    """Return sixteen arrays in an ordered dict."""
    return collections.OrderedDict(
        (f"array{index}", each) for index, each in enumerate(vectors(16))
    )


def nnx_state() -> Any:
    """Return the state of an MLP of Flax's NNX with eight layers."""
    nnx = importlib.import_module("flax.nnx")
    linears = [nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(index)) for index in range(8)]
    return nnx.state(nnx.Sequential(*linears))


def nnx_ends(state: Any, x: jax.Array) -> jax.Array:
    """Add the first bias and the last one to an example."""
    biases = jax.tree_util.tree_leaves(state)[::2]
    return x + biases[0] + biases[-1]


def train_state() -> Any:
    """Return Flax's training state of eight layers and Adam, its step counted by an array."""
    module = importlib.import_module("flax.training.train_state")
    optimiser = optax.adam(networks.LEARNING_RATE)
    state = module.TrainState.create(apply_fn=ends, params=layer_arrays(), tx=optimiser)
    return state.replace(step=jnp.asarray(0))


def train_state_ends(state: Any, x: jax.Array) -> jax.Array:
    """Add the first and the last parameter to an example."""
    return ends(state.params, x)


def count_step(state: Any, x: jax.Array) -> tuple[Any, jax.Array]:
    """Return the state one step on, and the example with two parameters added."""
    return state.replace(step=state.step + 1), train_state_ends(state, x)


def equinox_mlp() -> Any:
    """Return Equinox's own MLP of depth 8."""
    equinox = importlib.import_module("equinox")
    return networks.mlp(equinox, WIDTH, 8)


def scale_and_shift(scale: jax.Array, shift: jax.Array, x: jax.Array) -> jax.Array:
    """Return an affine map of an example."""
    return scale * x + shift


def times(factor: float, x: jax.Array) -> jax.Array:
    """Return an example times a number."""
    return factor * x


def call_with(function: Callable[[jax.Array], jax.Array], x: jax.Array) -> jax.Array:
    """Call the function that is an argument."""
    return function(x)


class Settings:
    """A static object, equal to itself alone, which holds what changes nothing in the program."""

    def __init__(self) -> None:
        self.table = {f"entry{index}": 0.5 * index for index in range(MANY)}


def read_settings(settings: Settings, x: jax.Array) -> jax.Array:
    """Add a number of the settings to an example."""
    return x + settings.table["entry1"]


def add_static(number: float, x: jax.Array) -> jax.Array:
    """Return the example, whatever the static number."""
    return x + (1.0 if math.isnan(number) else number)


def add_named(*, first: jax.Array, second: jax.Array, third: jax.Array, x: jax.Array) -> jax.Array:
    """Add three arrays to an example."""
    return x + first + second + third


def add_any(**arrays: jax.Array) -> jax.Array:
    """Add all arrays, whatever their names."""
    return functools.reduce(jnp.add, arrays.values())


def named() -> dict[str, jax.Array]:
    """Return four arrays by name."""
    return dict(zip(("first", "second", "third", "x"), vectors(4), strict=True))


def static(function: Callable[..., jax.Array], value: Any) -> Callable[[], Arguments]:
    """Return what makes the arguments of a function whose first argument is static."""
    return lambda: Arguments(function, (value, example()), static_argnums=(0,))


def partial_of_arrays() -> Arguments:
    """Return the call of a function that takes an affine map."""
    function = jax.tree_util.Partial(scale_and_shift, *vectors(2))
    return Arguments(call_with, (function, example()))


def plain_rows() -> list[Row]:
    """Return the rows of what Python and JAX bring."""
    halve = functools.partial(times, 0.5)
    holder = functools.partial(scale_and_shift, *vectors(2))
    return [
        row("list of 100 registered dataclasses", of_tree(lambda: pairs(Registered, MANY))),
        row("dict 100 deep, 1 array", of_tree(lambda: nested_dict(MANY, 1))),
        row("dict 100 deep, 100 arrays", of_tree(lambda: nested_dict(MANY, MANY))),
        row("OrderedDict of 16 arrays", of_tree(ordered_dict)),
        row("jax.tree_util.Partial of 2 arrays", partial_of_arrays),
        row("functools.partial, static", static(call_with, halve)),
        row("functools.partial of 2 arrays, static", static(call_with, holder)),
        row("static object with a dict of 100", static(read_settings, Settings())),
        row("static 0.5", static(add_static, 0.5)),
        row("static 0.0", static(add_static, 0.0)),
        row("static nan", static(add_static, math.nan)),
        row("keyword arguments", lambda: Arguments(add_named, (), named())),
        row("**kwargs", lambda: Arguments(add_any, (), named())),
    ]


def flax_rows() -> list[Row]:
    """Return the rows of what Flax brings."""

    def in_and_out() -> Arguments:
        return Arguments(count_step, (train_state(), example()), feeds_back=True)

    return [
        row("one flax struct", of_tree(lambda: pairs(struct(), 1)[0])),
        row("list of 100 flax structs", of_tree(lambda: pairs(struct(), MANY))),
        row("flax FrozenDict, 8 layers", of_tree(frozen_dict)),
        row("nnx.State, 8 layers", lambda: Arguments(nnx_ends, (nnx_state(), example()))),
        row(
            "flax TrainState, 8 layers",
            lambda: Arguments(train_state_ends, (train_state(), example())),
        ),
        row("flax TrainState, 8 layers, in and out", in_and_out),
    ]


def equinox_rows() -> list[Row]:
    """Return the rows of what Equinox brings."""

    def mlp() -> Arguments:
        return Arguments(networks.forward, (equinox_mlp(), example()), is_split=True)

    return [row("Equinox MLP, depth 8", mlp)]


def rows() -> list[Row]:
    """Return the rows whose libraries are installed."""
    peers = {"flax": flax_rows, "equinox": equinox_rows}
    installed = [make() for name, make in peers.items() if importlib.util.find_spec(name)]
    return [*itertools.chain(*installed), *plain_rows()]
