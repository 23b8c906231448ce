"""The Bayesian network on which Turing.jl compares differentiation backends.

There are two dense layers with ReLU between them. All weights ~ Normal(0, 1), `sigma` ~ Gamma(0.1,
1), and `y` ~ Normal(network(x), sigma). With 2 features, `width` units and one output there are
`4 * width + 1` unknowns: for each unit three weights before ReLU and one weight after it, and
`sigma`. The output has no bias.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

import eqxlike
from benchmarks.networks import with_arrays
from benchmarks.zoo import densities as density
from benchmarks.zoo.problem import Problem, floats, single
from eqxlike import Module, nn

FEATURES = 2
POINTS = 64

WIDTHS = (5, 16, 150)
"""The widths for 21, 65 and 601 unknowns, the sizes that Turing.jl compares."""

BRANCHED = (16, 4)
"""The width of the network with parallel branches, and the number of its branches."""

CLEARANCE = 0.02
"""The minimum distance of all units from the kink of ReLU, for all data. Finite differences across
the kink would differ from the derivative.
"""

CONSTRAINTS = {"sigma": "positive"}


class BayesianNetwork(Module):
    """A `hidden` layer, an `output` layer, and the noise `sigma`."""

    hidden: Any
    output: nn.Linear
    sigma: Array

    def __call__(self, x: Array) -> Array:
        """The mean for one point, of shape (1,)."""
        return self.output(jax.nn.relu(self.hidden(x)))


class Branches(Module):
    """Equal branches, stored stacked and called together. Their outputs are concatenated."""

    layers: nn.Linear

    def __call__(self, x: Array) -> Array:
        return eqxlike.filter_vmap(lambda layer: layer(x))(self.layers).ravel()


def log_density(unknowns: BayesianNetwork, data: tuple[Array, Array]) -> Array:
    """The log density of the unknowns and of `y`."""
    x, y = data
    weights = [leaf.ravel() for leaf in floats((unknowns.hidden, unknowns.output))]
    prior = density.gamma(unknowns.sigma, 0.1, 1.0)
    prior += density.isotropic_normal(jnp.concatenate(weights), 0.0, 1.0)
    return prior + density.isotropic_normal(y, jax.vmap(unknowns)(x)[:, 0], unknowns.sigma)


def bayesian_network(width: int) -> Problem:
    """The network with one dense hidden layer."""

    def start() -> tuple[BayesianNetwork, tuple[Array, Array]]:
        weight, bias, output, data = _drawn(width)
        hidden = nn.Linear(FEATURES, width, key=jax.random.key(0))
        return _with_weights(hidden, [weight, bias, output]), data

    return Problem(name(width), log_density, start, CONSTRAINTS)


def parallel_network(width: int, branches: int) -> Problem:
    """The network whose hidden layer has equal branches with concatenated outputs."""

    def start() -> tuple[BayesianNetwork, tuple[Array, Array]]:
        weight, bias, output, data = _drawn(width)
        each = width // branches
        keys = jax.random.split(jax.random.key(0), branches)
        layers = eqxlike.filter_vmap(lambda key: nn.Linear(FEATURES, each, key=key))(keys)
        hidden = Branches(layers)
        stacked = [weight.reshape(branches, each, FEATURES), bias.reshape(branches, each)]
        return _with_weights(hidden, [*stacked, output]), data

    return Problem(name(width, branches), log_density, start, CONSTRAINTS)


def name(width: int, branches: int = 1) -> str:
    """The name of the network whose hidden layer has this many branches."""
    extra = f", {branches} parallel branches" if branches > 1 else ""
    return f"Bayesian network{extra}, {4 * width + 1} unknowns"


def _with_weights(hidden: Any, arrays: list[np.ndarray]) -> BayesianNetwork:
    """The network with this hidden layer and these weights, in tree order."""
    output = nn.Linear(arrays[-1].shape[1], 1, use_bias=False, key=jax.random.key(0))
    network = BayesianNetwork(hidden, output, jnp.zeros(()))
    return with_arrays(eqxlike, network, [*arrays, np.float32(0.5)])


def _drawn(width: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, tuple[Array, Array]]:
    """Weight and bias of the hidden layer, weight of the output, and data that avoid the kinks."""
    draw = np.random.default_rng(7)
    weight = draw.normal(size=(width, FEATURES)).astype(np.float32)
    bias = draw.normal(0, 0.5, width).astype(np.float32)
    output = draw.normal(0, width**-0.5, (1, width)).astype(np.float32)
    x = draw.normal(size=(100 * POINTS, FEATURES)).astype(np.float32)
    is_clear = np.min(np.abs(x @ weight.T + bias), axis=1) > CLEARANCE
    x = x[is_clear][:POINTS]
    y = np.sin(x[:, 0]) * x[:, 1] + draw.normal(0, 0.3, len(x))
    return weight, bias, output, (single(x), single(y))
