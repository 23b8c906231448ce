"""What users of a layer pay for: building it, the first call, every other call, the gradient."""

import functools
from collections.abc import Callable, Mapping

import jax

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
from eqxlike._timing import Call

CONSTRUCT = Table("Construct a model from a key, its initialisers compiled before")
FIRST_CALL = Table("First call of the forward pass (trace, compile, run)", is_first_call=True)
FORWARD = Table("Forward pass of a batch", clocks=("completion", "dispatch"))
GRADIENT = Table(
    "Value and gradient of the mean of squares over a batch", clocks=("completion", "dispatch")
)


def construct(network: Network) -> Row:
    """Return the row that builds a network, with each library's own initial values."""

    def build(column: str) -> Call:
        return functools.partial(IMPLEMENTATIONS[column](network).make, jax.random.key(0))

    return Row(CONSTRUCT, _case(network, build), check_sizes)


def first_call(network: Network) -> Row:
    """Return the row that applies a new model for the first time, by a new compiled function."""

    def build(column: str) -> Prepare:
        IMPLEMENTATIONS[column](network)  # Raises here if the library is not installed.
        return functools.partial(_compiled, network, column)

    return Row(FIRST_CALL, _case(network, build), check_first_calls)


def forward(network: Network) -> Row:
    """Return the row that applies a network to its batch."""
    return Row(FORWARD, _case(network, lambda column: _compiled(network, column)), check_agreement)


def gradient(network: Network) -> Row:
    """Return the row that differentiates a network by its parameters."""

    def build(column: str) -> Call:
        implementation = IMPLEMENTATIONS[column](network)
        model, batch = implementation.holding(weights(network)), implementation.batch
        function = implementation.differentiated()
        # The loss is ready together with the gradient, and waiting for it flattens nothing.
        return lambda: function(model, batch)[0]

    def check(calls: Mapping[str, Call]) -> None:
        # The calls return the loss alone; the gradient is checked with it.
        check_gradients(network, tuple(calls))

    return Row(GRADIENT, _case(network, build), check)


def _compiled(network: Network, column: str) -> Call:
    """Return a call of a new compiled function on a new model."""
    implementation = IMPLEMENTATIONS[column](network)
    # A new lambda, since libraries find a compiled function again by the function it is of.
    function = implementation.jit(lambda model, batch: implementation.apply(model, batch))
    return functools.partial(
        function, implementation.holding(weights(network)), implementation.batch
    )


def _case(network: Network, build: Callable[[str], Call]) -> Case:
    """Return the case with a column for each library, ratios to Equinox."""
    builders = {column: functools.partial(build, column) for column in IMPLEMENTATIONS}
    return Case(network.name, builders, baseline=EQUINOX)
