"""The networks of `benchmarks.networks` for Flax NNX. Importing this needs flax."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from benchmarks import bayesian, networks
from benchmarks.timing import Call


class MLP(nnx.Module):
    """Linear layers with ReLU between them, called with one example or a batch."""

    def __init__(self, arrays: Sequence[Any]):
        """`arrays` are weight, of shape (features out, features in), and bias of each layer."""
        self.layers = nnx.List(map(_linear, arrays[::2], arrays[1::2]))

    def __call__(self, x: jax.Array) -> jax.Array:
        *hidden, last = self.layers
        for layer in hidden:
            x = jax.nn.relu(layer(x))
        return last(x)


class Identity(nnx.Module):
    """A model that returns its input."""

    def __call__(self, x: jax.Array) -> jax.Array:
        return x


def mlp(width: int, depth: int) -> MLP:
    """An MLP with `depth` hidden layers. All layers have `width` features."""
    return MLP(networks.weights([width] * (depth + 2)))


def forward(model: nnx.Module, x: jax.Array) -> Call:
    """A call of the compiled forward pass."""
    function = nnx.jit(lambda model, x: model(x))
    return lambda: function(model, x)


def training_step(model: nnx.Module, loss: Any, data: Sequence[jax.Array]) -> Call:
    """A call of the compiled training step, which updates model and optimiser in place."""
    optimiser = nnx.Optimizer(model, networks.optimiser(), wrt=nnx.Param)

    @nnx.jit
    def step(model: nnx.Module, optimiser: nnx.Optimizer, *data: jax.Array) -> jax.Array:
        value, gradients = nnx.value_and_grad(loss)(model, *data)
        optimiser.update(model, gradients)
        return value

    return lambda: step(model, optimiser, *data)


def mean_squared_error(model: Any, x: jax.Array, y: jax.Array) -> jax.Array:
    """The mean squared error of a model of a batch."""
    return jnp.mean((model(x) - y) ** 2)


class BayesianLinear(nnx.Module):
    """A layer with independent Gaussian weights, made from an eqxlike layer."""

    def __init__(self, layer: Any):
        self.weight_mean = nnx.Param(layer.weight_mean)
        self.weight_rho = nnx.Param(layer.weight_rho)
        self.bias_mean = nnx.Param(layer.bias_mean)
        self.bias_rho = nnx.Param(layer.bias_rho)
        self.prior_scale = layer.prior_scale

    def __call__(self, x: jax.Array, *, key: jax.Array) -> jax.Array:
        return bayesian.output(x, key, *self._parameters())

    def kl(self) -> jax.Array:
        return bayesian.divergence(*self._parameters(), prior_scale=self.prior_scale)

    def _parameters(self) -> tuple[jax.Array, ...]:
        parameters = self.weight_mean, self.weight_rho, self.bias_mean, self.bias_rho
        return tuple(parameter[...] for parameter in parameters)


class BayesianMLP(nnx.Module):
    """Layers with independent Gaussian weights and ReLU between them."""

    def __init__(self, ours: Any):
        self.layers = nnx.List(map(BayesianLinear, ours.layers))

    def __call__(self, x: jax.Array, *, key: jax.Array) -> jax.Array:
        *hidden, last = self.layers
        *hidden_keys, last_key = jax.random.split(key, len(self.layers))
        for layer, layer_key in zip(hidden, hidden_keys, strict=True):
            x = jax.nn.relu(layer(x, key=layer_key))
        return last(x, key=last_key)


def elbo_step(key: jax.Array, data: Sequence[jax.Array]) -> Call:
    """A call of the compiled ELBO step of `bayesian.network()`."""
    model = BayesianMLP(bayesian.network())
    optimiser = nnx.Optimizer(model, networks.optimiser(), wrt=nnx.Param)

    @nnx.jit
    def compiled(
        model: nnx.Module, optimiser: nnx.Optimizer, key: jax.Array, *data: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        key, step_key = jax.random.split(key)
        gradient = nnx.value_and_grad(bayesian.negative_elbo)
        value, gradients = gradient(model, step_key, *data)
        optimiser.update(model, gradients)
        return key, value

    def step() -> jax.Array:
        nonlocal key
        key, value = compiled(model, optimiser, key, *data)
        return value

    return step


def _linear(weight: Any, bias: Any) -> nnx.Linear:
    layer = nnx.Linear(weight.shape[1], weight.shape[0], rngs=nnx.Rngs(0))
    layer.kernel = nnx.Param(jnp.asarray(weight.T))
    layer.bias = nnx.Param(jnp.asarray(bias))
    return layer
