"""The Bayesian network of the demo's training step, in eqxlike and in Equinox.

Equinox has no Bayesian layers, so this file defines them with the formulas in the docstrings of
eqxlike's layers. A check compares the columns before they are timed.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

import eqxlike
from benchmarks import networks

FEATURES = 64
WIDTH = 64
CLASSES = 10
EXAMPLES = 1347
"""The number of training examples of the digits, over which the ELBO is defined."""

Parameters = tuple[jax.Array, ...]
"""Mean and rho of the weight, mean and rho of the bias."""


def network() -> Any:
    """A Bayesian network of two layers, 64 to 64 to 10."""
    return eqxlike.nn.BayesianMLP(
        FEATURES, CLASSES, width_size=WIDTH, depth=1, key=jax.random.key(0)
    )


def equinox_network(equinox: Any) -> Any:
    """`network()` as an Equinox model with the same tree, leaves and static fields."""

    class BayesianLinear(equinox.Module):
        weight_mean: jax.Array
        weight_rho: jax.Array
        bias_mean: jax.Array
        bias_rho: jax.Array
        prior_scale: float
        inference: bool
        shared_key: None
        in_features: int = equinox.field(static=True)
        out_features: int = equinox.field(static=True)
        use_bias: bool = equinox.field(static=True)
        estimator: str = equinox.field(static=True)

        def __call__(self, x: jax.Array, *, key: jax.Array) -> jax.Array:
            return output(x, key, self._parameters())

        def kl(self) -> jax.Array:
            return divergence(self._parameters(), self.prior_scale)

        def _parameters(self) -> Parameters:
            return self.weight_mean, self.weight_rho, self.bias_mean, self.bias_rho

    class BayesianMLP(equinox.Module):
        layers: tuple[BayesianLinear, ...]
        activation: Callable[[jax.Array], jax.Array]

        def __call__(self, x: jax.Array, *, key: jax.Array) -> jax.Array:
            keys = jax.random.split(key, len(self.layers))
            for layer, layer_key in zip(self.layers[:-1], keys[:-1], strict=True):
                x = self.activation(layer(x, key=layer_key))
            return self.layers[-1](x, key=keys[-1])

    ours = network()
    layers = tuple(
        BayesianLinear(
            **{field.name: getattr(layer, field.name) for field in dataclasses.fields(layer)}
        )
        for layer in ours.layers
    )
    return BayesianMLP(layers, ours.activation)


def output(x: jax.Array, key: jax.Array, parameters: Parameters) -> jax.Array:
    """Draws the output of a layer with independent Gaussian weights (local reparameterisation)."""
    weight_mean, weight_rho, bias_mean, bias_rho = parameters
    mean = weight_mean @ x + bias_mean
    variance = jax.nn.softplus(weight_rho) ** 2 @ x**2 + jax.nn.softplus(bias_rho) ** 2
    return mean + jnp.sqrt(variance) * jax.random.normal(key, mean.shape, mean.dtype)


def divergence(parameters: Parameters, prior_scale: float) -> jax.Array:
    """KL(posterior || prior) of a layer. The prior variance of weights is divided by fan-in."""
    weight_mean, weight_rho, bias_mean, bias_rho = parameters

    def gaussian(mean: jax.Array, rho: jax.Array, prior: float) -> jax.Array:
        ratio = (jax.nn.softplus(rho) / prior) ** 2
        return jnp.sum((ratio + (mean / prior) ** 2 - 1 - jnp.log(ratio)) / 2)

    weight_prior = prior_scale / weight_mean.shape[1] ** 0.5
    of_weight = gaussian(weight_mean, weight_rho, weight_prior)
    return of_weight + gaussian(bias_mean, bias_rho, prior_scale)


def data(batch: int) -> tuple[jax.Array, jax.Array]:
    """A minibatch with the shape of the digits."""
    return networks.normal(batch, FEATURES, seed=1), jnp.arange(batch) % CLASSES


def negative_elbo(model: Any, key: jax.Array, x: jax.Array, y: jax.Array) -> jax.Array:
    """The minibatch estimate of the negative ELBO, divided by the number of examples."""
    logits = jax.vmap(lambda x, key: model(x, key=key))(x, jax.random.split(key, len(x)))
    negative_log_likelihood = optax.softmax_cross_entropy_with_integer_labels(logits, y)
    return jnp.mean(negative_log_likelihood) + sum(layer.kl() for layer in model.layers) / EXAMPLES


def elbo_step(library: Any) -> Callable[..., Any]:
    """The step `(model, opt_state, key, x, y) -> (model, opt_state, key, loss)`."""
    adam_step = networks.training_step(library, negative_elbo)

    def step(model: Any, opt_state: Any, key: jax.Array, x: jax.Array, y: jax.Array) -> Any:
        key, step_key = jax.random.split(key)
        model, opt_state, loss = adam_step(model, opt_state, step_key, x, y)
        return model, opt_state, key, loss

    return step
