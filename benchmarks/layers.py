"""The costs of the layers of eqxlike.nn, compared with Equinox and NNX.

Four networks are constructed, called for the first time, called again and differentiated. Deep
models are constructed, and stacks of equal layers are compiled. An attention and a convolution are
differentiated and compared with JAX's and PyTorch's functions. A check before timing compares the
outputs and gradients that all libraries compute from the same weights. Only constructed models
differ, because each library draws its own initial values.

`benchmarks.timing` describes the method. First calls and compilations are timed without a
compilation cache on disk. Ctrl-C prints the rows that are finished.
"""

import dataclasses
import functools
import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import eqxlike
from benchmarks import command, layer_kernels, layer_models, networks
from benchmarks.cases import Case, check_agreement, check_first_calls
from benchmarks.command import Row
from benchmarks.layer_models import CNNSizes, LSTMSizes, MLPSizes, TransformerSizes
from benchmarks.report import Table
from benchmarks.timing import Call, Prepare

NAME = "benchmarks.layers"
ROUNDS = command.Rounds(default=50, quick=5)
FIRST_ROUNDS = command.Rounds(default=15, quick=2)


# --- networks, and how a library computes them ---
#
# eqxlike and Equinox take one example, compile by their `filter_jit` and batch with `jax.vmap`; NNX
# takes a batch. All of them hold the same weights: those that eqxlike draws.

OURS = "eqxlike"
EQUINOX = "Equinox"
NNX = "NNX"

TOLERANCE = 1e-4
"""The tolerance of gradients, which are sums over a batch and over steps. Libraries add them in
different orders.
"""


@dataclasses.dataclass(frozen=True)
class Network:
    """A network and the batch that it is applied to.

    - `name`: the name of the row in each table.
    - `maker`: the name of the function in `layer_models` and `nnx_layer_models` that makes it.
    - `sizes`: the argument `sizes` of this function.
    - `batch_shape`: the shape of the input, with channels first.
    """

    name: str
    maker: str
    sizes: Any
    batch_shape: tuple[int, ...]

    def batch(self) -> jax.Array:
        """The input, with channels first."""
        return networks.normal(*self.batch_shape, seed=1)


@dataclasses.dataclass(frozen=True)
class Implementation:
    """A network in a library.

    - `make`: returns a new model from a key.
    - `load`: returns the model with eqxlike's parameters, which are passed in tree order.
    - `arrays`: returns the arrays of a model or of its gradient.
    - `apply`: returns the output of a model for a batch.
    - `jit`: compiles a function of a model and a batch.
    - `value_and_grad`: differentiates such a function with respect to the model.
    - `batch`: the input, in the library's layout.
    """

    make: Callable[[jax.Array], Any]
    load: Callable[[Any, Sequence[jax.Array]], Any]
    arrays: Callable[[Any], list[jax.Array]]
    apply: Callable[[Any, jax.Array], jax.Array]
    jit: Callable[..., Any]
    value_and_grad: Callable[..., Any]
    batch: jax.Array

    def holding(self, arrays: Sequence[jax.Array]) -> Any:
        """A new model with the parameters `arrays`, in eqxlike's order."""
        return self.load(self.make(jax.random.key(0)), arrays)

    def differentiated(self) -> Callable[[Any, jax.Array], tuple[jax.Array, Any]]:
        """A new compiled function that returns the mean of squares and its gradient."""

        def loss(model: Any, batch: jax.Array) -> jax.Array:
            return jnp.mean(self.apply(model, batch) ** 2)

        return self.jit(self.value_and_grad(loss))


def of_modules(library: Any, network: Network) -> Implementation:
    """The network in eqxlike, or in a library with the same public names."""
    make = getattr(layer_models, network.maker)
    return Implementation(
        make=lambda key: make(library, network.sizes, key),
        load=lambda model, arrays: networks.with_arrays(library, model, arrays),
        arrays=lambda tree: jax.tree_util.tree_leaves(library.filter(tree, library.is_array)),
        apply=networks.forward_batch,
        jit=library.filter_jit,
        value_and_grad=library.filter_value_and_grad,
        batch=network.batch(),
    )


def of_nnx(network: Network) -> Implementation:
    """The network in NNX. Raises ImportError if Flax is not installed."""
    nnx = importlib.import_module("flax.nnx")
    make = getattr(importlib.import_module("benchmarks.nnx_layer_models"), network.maker)

    def load(model: Any, arrays: Sequence[jax.Array]) -> Any:
        model.load(iter(arrays))
        return model

    batch = network.batch()
    return Implementation(
        make=lambda key: make(network.sizes, key),
        load=load,
        arrays=jax.tree_util.tree_leaves,
        apply=networks.forward,
        jit=nnx.jit,
        value_and_grad=nnx.value_and_grad,
        batch=jnp.moveaxis(batch, 1, -1) if network.maker == "cnn" else batch,
    )


IMPLEMENTATIONS: dict[str, Callable[[Network], Implementation]] = {
    OURS: lambda network: of_modules(eqxlike, network),
    EQUINOX: lambda network: of_modules(importlib.import_module("equinox"), network),
    NNX: of_nnx,
}
"""Maps a column to the function that implements a network. The function raises ImportError if the
library is not installed.
"""


def weights(network: Network) -> list[jax.Array]:
    """The parameters that eqxlike draws, in tree order."""
    ours = IMPLEMENTATIONS[OURS](network)
    return ours.arrays(ours.make(jax.random.key(0)))


def check_gradients(network: Network, columns: Sequence[str]) -> None:
    """Checks that the libraries of these columns compute the same loss and gradient as eqxlike.

    **Raises:** `AssertionError` that names the differing column and the numbers, or a gradient that
    is zero, because a zero gradient is a weak test.
    """
    parameters = weights(network)
    ours = IMPLEMENTATIONS[OURS](network)
    loss, gradient = ours.differentiated()(ours.holding(parameters), ours.batch)
    gradient = ours.arrays(gradient)
    if not all(np.any(array) for array in gradient):
        raise AssertionError(f"the gradient of a parameter of {network.name!r} is zero")
    for column in columns:
        if column == OURS:
            continue
        other = IMPLEMENTATIONS[column](network)
        result = other.differentiated()(other.holding(parameters), other.batch)
        # A library that stores a transposed parameter has a transposed gradient, so gradients are
        # loaded like parameters.
        expected = [loss, *other.arrays(other.holding(gradient))]
        for one, another in zip([result[0], *other.arrays(result[1])], expected, strict=True):
            np.testing.assert_allclose(
                one,
                another,
                rtol=0,
                atol=TOLERANCE * float(np.max(np.abs(another))),
                err_msg=f"the loss or gradient of {column!r} differs from {OURS!r}",
            )


NETWORKS: tuple[Network, ...] = (
    Network("MLP 784-512-512-10, batch 64", "mlp", MLPSizes(784, 512, 2, 10), (64, 784)),
    Network(
        "CNN 3-32-64-64 on 32 x 32, batch 32",
        "cnn",
        CNNSizes(side=32, channels=(3, 32, 64, 64), classes=10),
        (32, 3, 32, 32),
    ),
    Network("LSTM 32-64, 128 steps, batch 16", "lstm", LSTMSizes(32, 64), (16, 128, 32)),
    Network(
        "Transformer of 6, width 128, 64 tokens, batch 4",
        "transformer",
        TransformerSizes(width=128, heads=4, depth=6),
        (4, 64, 128),
    ),
)


# --- the costs to users: construction, the first call, further calls, the gradient ---

REORDER = "order of arrays alone"

CONSTRUCT = Table("Construct a model from a key, its initialisers compiled before")
FIRST_CONSTRUCT = Table("Construct a model for the first time in a process", is_first_call=True)
FIRST_CALL = Table("First call of the forward pass (trace, compile, run)", is_first_call=True)
COMPILE = Table("Compile the forward pass, lowered before", is_first_call=True)
FORWARD = Table("Forward pass of a batch", clocks=("completion", "dispatch"))
GRADIENT = Table(
    "Value and gradient of the mean of squares over a batch", clocks=("completion", "dispatch")
)


def construct(network: Network) -> Row:
    """The row that builds a network, with the initial values of each library."""

    def build(column: str) -> Call:
        return functools.partial(IMPLEMENTATIONS[column](network).make, jax.random.key(0))

    return Row(CONSTRUCT, _case(network, build), check_sizes)


def first_construct(network: Network) -> Row:
    """The row that builds a network before JAX has compiled a program."""

    def build(column: str) -> Prepare:
        make = IMPLEMENTATIONS[column](network).make

        def prepare() -> Call:
            jax.clear_caches()
            # The key is made before the clock starts.
            return functools.partial(make, jax.block_until_ready(jax.random.key(0)))

        return prepare

    def check(preparations: Mapping[str, Prepare]) -> None:
        check_sizes({column: prepare() for column, prepare in preparations.items()})

    return Row(FIRST_CONSTRUCT, _case(network, build), check)


def first_call(network: Network) -> Row:
    """The row that applies a new model for the first time, with a new compiled function."""

    def build(column: str) -> Prepare:
        IMPLEMENTATIONS[column](network)  # raises ImportError if the library is not installed
        return functools.partial(_compiled, network, column)

    return Row(FIRST_CALL, _case(network, build), check_first_calls)


def compilation(network: Network) -> Row:
    """The row that compiles the program of the first call.

    The row of a CNN has an additional column, which compiles only the reordering of arrays.
    """

    def build(column: str) -> Prepare:
        IMPLEMENTATIONS[column](network)

        def prepare() -> Call:
            call = _compiled(network, column)
            return call.func.lower(*call.args).compile

        return prepare

    case = _case(network, build)
    if network.maker == "cnn":
        reorder = {REORDER: lambda: lambda: _reordering(network).compile}
        case = Case(case.name, {**case.builders, **reorder}, case.baseline)
    # Another row compares the first calls of this network.
    return Row(COMPILE, case, lambda preparations: None)


def forward(network: Network) -> Row:
    """The row that applies a network to its batch."""
    return Row(FORWARD, _case(network, lambda column: _compiled(network, column)), check_agreement)


def gradient(network: Network) -> Row:
    """The row that differentiates a network with respect to its parameters."""

    def build(column: str) -> Call:
        implementation = IMPLEMENTATIONS[column](network)
        model, batch = implementation.holding(weights(network)), implementation.batch
        function = implementation.differentiated()
        # The loss is ready together with the gradient. Waiting for it does not flatten a tree.
        return lambda: function(model, batch)[0]

    def check(calls: Mapping[str, Call]) -> None:
        # The calls return only the loss. This check also compares the gradients.
        check_gradients(network, tuple(calls))

    return Row(GRADIENT, _case(network, build), check)


def _reordering(network: Network) -> Any:
    """The lowered program that only reorders the arrays of a CNN.

    It converts them to the layout of XLA's CPU convolutions, which NNX also uses, and converts the
    last features back to eqxlike's order.
    """
    kernels = [array for array in weights(network) if array.ndim == 4]
    images = network.batch()
    channels, *sides = layer_models.flat_shape(network.sizes)
    features = jnp.zeros((len(images), *sides, channels))

    def reorder(images: jax.Array, kernels: list[jax.Array], features: jax.Array) -> Any:
        last = [jnp.transpose(kernel, (2, 3, 1, 0)) for kernel in kernels]
        return jnp.moveaxis(images, 1, -1), last, jnp.moveaxis(features, -1, 1)

    return jax.jit(reorder).lower(images, kernels, features)


def _compiled(network: Network, column: str) -> functools.partial:
    """A call of a new compiled function on a new model."""
    implementation = IMPLEMENTATIONS[column](network)
    # A new lambda, because libraries find a compiled function by the original function.
    function = implementation.jit(lambda model, batch: implementation.apply(model, batch))
    return functools.partial(
        function, implementation.holding(weights(network)), implementation.batch
    )


def _case(network: Network, build: Callable[[str], Call]) -> Case:
    """The case with a column for each library, and ratios to Equinox."""
    builders = {column: functools.partial(build, column) for column in IMPLEMENTATIONS}
    return Case(network.name, builders, baseline=EQUINOX)


def check_sizes(calls: Mapping[str, Call]) -> None:
    """Checks that the models of all columns have the same number of parameters.

    **Raises:** `AssertionError` that names the number of each column.
    """
    sizes = {
        column: sum(
            leaf.size for leaf in jax.tree_util.tree_leaves(call()) if isinstance(leaf, jax.Array)
        )
        for column, call in calls.items()
    }
    if len(set(sizes.values())) > 1:
        raise AssertionError(f"the models differ in their numbers of parameters: {sizes}")


# --- the costs of depth: building a hundred layers, compiling a stack of equal ones ---

ARRAYS = "arrays alone"
SCAN_STACK = "ScanStack"
SEQUENTIAL = "Sequential"

CONSTRUCT_DEEP = Table(
    "Construct a deep model, compared with one jax.random.uniform call a parameter"
)
COMPILE_STACK = Table("Trace, lower and compile a stack of equal layers", is_first_call=True)


def sequential(depth: int, width: int) -> Row:
    """The row that builds a `Sequential` of linear layers."""
    return _construct(
        f"Sequential of {depth} Linear, width {width}",
        lambda library: layer_models.linears(library, width, depth, jax.random.key(0)),
        lambda peer: peer.linears(width, depth, jax.random.key(0)),
        layer_models.linear_shapes(width, depth),
    )


def mlp(depth: int, width: int) -> Row:
    """The row that builds an MLP with `depth` hidden layers."""
    sizes = MLPSizes(features=width, width=width, depth=depth, classes=width)
    return _construct(
        f"MLP of depth {depth}, width {width}",
        lambda library: layer_models.mlp(library, sizes, jax.random.key(0)),
        lambda peer: peer.mlp(sizes, jax.random.key(0)),
        layer_models.linear_shapes(width, depth + 1),
    )


def stack(depth: int, width: int) -> Row:
    """The row that compiles `depth` layers, in a loop and in sequence."""
    x = networks.normal(width, seed=1)
    columns = (SEQUENTIAL, SCAN_STACK)

    def prepare(column: str) -> Call:
        model, function = stack_model(column, depth, width), _new_function()
        return lambda: function.lower(model, x).compile()

    def check(preparations: Mapping[str, Prepare]) -> None:
        check_agreement(
            {
                column: functools.partial(prepare()(), stack_model(column, depth, width), x)
                for column, prepare in preparations.items()
            },
            times=1,
        )

    def count_lines() -> dict[str, int]:
        lowered = {
            column: _new_function().lower(stack_model(column, depth, width), x)
            for column in columns
        }
        return {column: len(program.as_text().splitlines()) for column, program in lowered.items()}

    def build(column: str) -> Prepare:
        return functools.partial(prepare, column)

    builders = {column: functools.partial(build, column) for column in columns}
    case = Case(f"{depth} MLPs of width {width}", builders, baseline=SEQUENTIAL)
    return Row(COMPILE_STACK, case, check, count_lines)


def stack_model(column: str, depth: int, width: int) -> Any:
    """MLPs with one hidden layer of twice the width, stored as in the column."""
    keys = layer_models.split_keys(jax.random.key(0), depth)
    layers = [eqxlike.nn.MLP(width, width, 2 * width, 1, key=key) for key in keys]
    arrange = eqxlike.nn.Sequential if column == SEQUENTIAL else eqxlike.nn.ScanStack.stack
    return arrange(layers)


def _new_function() -> Any:
    """A function that was never compiled. Libraries find a compiled function by the original."""
    return eqxlike.filter_jit(lambda model, x: model(x))


def _construct(
    name: str,
    make: Callable[[Any], Any],
    make_nnx: Callable[[Any], Any],
    shapes: Sequence[tuple[int, ...]],
) -> Row:
    """The row that builds a model.

    **Arguments:**

    - `name`: the name of the row.
    - `make`: makes the model with a library, eqxlike or Equinox.
    - `make_nnx`: makes the model with NNX, from `benchmarks.nnx_layer_models`.
    - `shapes`: the shapes of the parameters.
    """
    limit = shapes[0][-1] ** -0.5

    def bind(function: Callable[[Any], Any], module: str) -> Call:
        return functools.partial(function, importlib.import_module(module))

    builders = {
        ARRAYS: lambda: lambda: layer_models.uniform_arrays(shapes, limit, jax.random.key(0)),
        OURS: lambda: bind(make, "eqxlike"),
        EQUINOX: lambda: bind(make, "equinox"),
        NNX: lambda: bind(make_nnx, "benchmarks.nnx_layer_models"),
    }
    return Row(CONSTRUCT_DEEP, Case(name, builders, baseline=ARRAYS), check_sizes)


# --- the command ---

ROWS: tuple[Row, ...] = (
    *map(construct, NETWORKS),
    *map(first_construct, NETWORKS),
    *map(first_call, NETWORKS),
    *map(compilation, NETWORKS),
    *map(forward, NETWORKS),
    *map(gradient, NETWORKS),
    sequential(depth=100, width=64),
    mlp(depth=100, width=64),
    *(stack(depth, width=64) for depth in (4, 16, 64)),
    *(
        layer_kernels.self_attention(width, length, batch, table)
        for table in (layer_kernels.FORWARD, layer_kernels.GRADIENT)
        for width, length, batch in ((32, 16, 4), (128, 64, 4), (512, 1, 1))
    ),
    *(
        layer_kernels.attention(length, batch, is_causal)
        for length, batch in ((128, 8), (256, 8), (1024, 2), (4096, 1))
        for is_causal in (True, False)
    ),
    *(
        layer_kernels.convolution(*sizes)
        for sizes in (
            (32, 64, 64, 32, 1),
            (32, 256, 64, 14, 1),
            (32, 32, 64, 32, 3),
            (32, 64, 64, 16, 3),
            (16, 128, 128, 28, 3),
        )
    ),
)


def main(arguments: Sequence[str] | None = None, rows: Sequence[Row] = ROWS) -> int:
    """Measures and prints. Returns 2 for a wrong argument and 130 after Ctrl-C."""
    options = command.parse(arguments, NAME, __doc__, ROUNDS, FIRST_ROUNDS)
    return command.measure_rows(NAME, options, rows)


if __name__ == "__main__":
    # With a cache on disk, a first call would compile nothing. The cache must be disabled before
    # JAX compiles its first program.
    jax.config.update("jax_enable_compilation_cache", False)
    sys.exit(main())
