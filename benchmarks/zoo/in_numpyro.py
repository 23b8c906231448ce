"""The Bayesian models of the zoo in NumPyro, to compare NumPyro's densities with ours.

Each model follows the docstring of our density. The names of its sites are the paths of our
unknowns.
"""

from collections.abc import Callable, Mapping
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpyro
from jax import Array
from numpyro import distributions as dist
from numpyro.infer.util import log_density, potential_energy

from benchmarks.zoo.bayesian_network import BRANCHED, WIDTHS, name
from benchmarks.zoo.problem import Problem

Model = Callable[..., None]
"""A NumPyro model, called with the data of the problem."""


def value(problem: Problem) -> Callable[[Any, Any], Any]:
    """NumPyro's log density of its model for a problem, in the space of the problem.

    **Returns:** a function of the unknowns by path, and of the data.

    **Raises:** `LookupError` if NumPyro has no model for the problem.
    """
    if problem.name not in MODELS:
        raise LookupError(f"NumPyro has no model for {problem.name}")
    model = MODELS[problem.name]
    if problem.is_linked:
        return lambda values, data: -potential_energy(model, data, {}, values)
    return lambda values, data: log_density(model, data, {}, values)[0]


def bayesian_network(width: int) -> Model:
    """The model of `bayesian_network.bayesian_network`."""

    def model(x: Array, y: Array) -> None:
        weight = _site("hidden.weight", _normal(width, x.shape[1]))
        bias = _site("hidden.bias", _normal(width))
        output = _site("output.weight", _normal(1, width))
        sigma = _site("sigma", dist.Gamma(0.1, 1.0))
        mean = jax.nn.relu(x @ weight.T + bias) @ output[0]
        numpyro.sample("y", dist.Normal(mean, sigma), obs=y)

    return model


def parallel_network(width: int, branches: int) -> Model:
    """The model of `bayesian_network.parallel_network`."""
    each = width // branches

    def model(x: Array, y: Array) -> None:
        weight = _site("hidden.layers.weight", _normal(branches, each, x.shape[1]))
        bias = _site("hidden.layers.bias", _normal(branches, each))
        output = _site("output.weight", _normal(1, width))
        sigma = _site("sigma", dist.Gamma(0.1, 1.0))
        units = jax.nn.relu(jnp.einsum("nf,buf->nbu", x, weight) + bias)
        mean = units.reshape(len(x), width) @ output[0]
        numpyro.sample("y", dist.Normal(mean, sigma), obs=y)

    return model


def logistic_regression(x: Array, y: Array) -> None:
    """The model of `bayesian.logistic_regression`."""
    weights = _site("weights", _normal(x.shape[1]))
    intercept = _site("intercept", dist.Normal(0.0, 1.0))
    numpyro.sample("y", dist.Bernoulli(logits=x @ weights + intercept), obs=y)


def eight_schools(y: Array, errors: Array) -> None:
    """The model of `bayesian.eight_schools`."""
    mean = _site("mean", dist.Normal(0.0, 5.0))
    scale = _site("scale", dist.HalfCauchy(5.0))
    with numpyro.plate("schools", len(y)):
        effects = _site("effects", dist.Normal(mean, scale))
        numpyro.sample("y", dist.Normal(effects, errors), obs=y)


def hierarchical_poisson(groups: int) -> Model:
    """The model of `bayesian.hierarchical_poisson`."""

    def model(group: Array, x: Array, y: Array) -> None:
        mean = _site("mean", dist.Normal(0.0, 1.0))
        slope = _site("slope", dist.Normal(0.0, 1.0))
        scale = _site("scale", dist.HalfNormal(1.0))
        with numpyro.plate("groups", groups):
            effects = _site("effects", dist.Normal(mean, scale))
        numpyro.sample("y", dist.Poisson(jnp.exp(effects[group] + slope * x)), obs=y)

    return model


def gaussian_mixture(y: Array) -> None:
    """The model of `bayesian.gaussian_mixture`."""
    weights = _site("weights", dist.Dirichlet(jnp.full(3, 2.0)))
    means = _ordered_normal("means", 3)
    scales = _site("scales", dist.HalfNormal(2.0).expand([3]).to_event(1))
    components = dist.Normal(means, scales)
    mixture = dist.MixtureSameFamily(dist.Categorical(weights), components)
    numpyro.sample("y", mixture, obs=y)


def lkj_normal(y: Array) -> None:
    """The model of `bayesian.lkj_normal`."""
    size = y.shape[1]
    scales = _site("scales", dist.HalfCauchy(2.0).expand([size]).to_event(1))
    cholesky = _site("cholesky", dist.LKJCholesky(size, 2.0))
    scaled = scales[:, None] * cholesky
    numpyro.sample("y", dist.MultivariateNormal(jnp.zeros(size), scale_tril=scaled), obs=y)


def dirichlet_categorical(classes: int) -> Model:
    """The model of `bayesian.dirichlet_categorical`."""

    def model(y: Array) -> None:
        probabilities = _site("probabilities", dist.Dirichlet(jnp.full(classes, 1.5)))
        numpyro.sample("y", dist.CategoricalProbs(probabilities), obs=y)

    return model


def garch(y: Array) -> None:
    """The model of `series.garch`."""
    mean = _site("mean", dist.Normal(0.0, 1.0))
    base = _site("base", dist.HalfNormal(1.0))
    weights = _site("weights", dist.Dirichlet(jnp.full(3, 2.0)))

    def step(variance: Array, y: Array) -> tuple[Array, Array]:
        return base + weights[0] * (y - mean) ** 2 + weights[1] * variance, variance

    _, variances = jax.lax.scan(step, base / weights[2], y)
    numpyro.sample("y", dist.Normal(mean, jnp.sqrt(variances)), obs=y)


def hidden_markov(states: int) -> Model:
    """The model of `series.hidden_markov`. The likelihood of the chain is a factor, as in NumPyro's
    examples.
    """

    def model(y: Array) -> None:
        rows = dist.Dirichlet(jnp.full((states, states), 1.5)).to_event(1)
        transition = _site("transition", rows)
        means = _ordered_normal("means", states)
        scale = _site("scale", dist.HalfNormal(2.0))

        def step(forward: Array, y: Array) -> tuple[Array, None]:
            reached = forward[:, None] + jnp.log(transition)
            return jax.nn.logsumexp(reached, axis=0) + dist.Normal(means, scale).log_prob(y), None

        first = dist.Normal(means, scale).log_prob(y[0]) - jnp.log(states)
        forward, _ = jax.lax.scan(step, first, y[1:])
        numpyro.factor("y", jax.nn.logsumexp(forward))

    return model


def _site(name: str, distribution: Any) -> Array:
    """The value of an unknown. NumPyro's type is wider: anything convertible to an array."""
    return cast(Array, numpyro.sample(name, distribution))


def _normal(*shape: int) -> Any:
    """Normal(0, 1) for each entry of an array."""
    return dist.Normal(0.0, 1.0).expand(shape).to_event(len(shape))


def _ordered_normal(name: str, size: int) -> Array:
    """The site of an ordered vector, with the density of Normal(0, 5) for each entry."""
    ordered = dist.ImproperUniform(dist.constraints.ordered_vector, (), (size,))
    values = _site(name, ordered)
    numpyro.factor(f"{name}.prior", jnp.sum(dist.Normal(0.0, 5.0).log_prob(values)))
    return values


MODELS: Mapping[str, Model] = {
    **{name(width): bayesian_network(width) for width in WIDTHS},
    name(*BRANCHED): parallel_network(*BRANCHED),
    "logistic regression": logistic_regression,
    "eight schools": eight_schools,
    "hierarchical Poisson": hierarchical_poisson(10),
    "Gaussian mixture, ordered means": gaussian_mixture,
    "LKJ-correlated normal": lkj_normal,
    "Dirichlet-categorical": dirichlet_categorical(6),
    "GARCH": garch,
    "hidden Markov model": hidden_markov(3),
}
