"""The networks of the layer benchmark in each library, with the transformations of the library.

A `Network` defines a computation, and an `Implementation` defines how a library computes it. Models
of eqxlike and Equinox are called with one example, compiled with `filter_jit` and batched with
`jax.vmap`. Models of NNX are called with a batch. All have the weights that eqxlike draws.
"""

import dataclasses
import importlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import eqxlike
from benchmarks import layer_models, networks

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
    Network(
        "MLP 784-512-512-10, batch 64",
        "mlp",
        layer_models.MLPSizes(features=784, width=512, depth=2, classes=10),
        (64, 784),
    ),
    Network(
        "CNN 3-32-64-64 on 32 x 32, batch 32",
        "cnn",
        layer_models.CNNSizes(side=32, channels=(3, 32, 64, 64), classes=10),
        (32, 3, 32, 32),
    ),
    Network(
        "LSTM 32-64, 128 steps, batch 16",
        "lstm",
        layer_models.LSTMSizes(features=32, hidden=64),
        (16, 128, 32),
    ),
    Network(
        "Transformer of 6, width 128, 64 tokens, batch 4",
        "transformer",
        layer_models.TransformerSizes(width=128, heads=4, depth=6),
        (4, 64, 128),
    ),
)
