"""The costs of a layer: construction, first call, later calls and gradient."""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks import layer_models
from benchmarks.cases import Case, check_agreement
from benchmarks.layer_networks import (
    EQUINOX,
    IMPLEMENTATIONS,
    Network,
    check_gradients,
    weights,
)
from benchmarks.layer_rows import Row, Table, check_first_calls, check_sizes
from benchmarks.layer_timing import Prepare
from benchmarks.timing import Call

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
