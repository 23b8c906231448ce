"""The Bayesian models of the zoo, and their log densities.

The unknowns of each are a Module whose fields have the model's names; the data are a tuple. The
last two models loop over series by `jax.lax.scan`; the data of the others are exchangeable.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from benchmarks.zoo import densities as density
from benchmarks.zoo.problem import Problem, single
from eqxlike import Module


class Logistic(Module):
    """`weights` of shape (features,), and `intercept`."""

    weights: Array
    intercept: Array


class EightSchools(Module):
    """`effects` of shape (8,), and their `mean` and `scale`."""

    mean: Array
    scale: Array
    effects: Array


class HierarchicalPoisson(Module):
    """`effects` of shape (groups,), their `mean` and `scale`, and a `slope`."""

    mean: Array
    scale: Array
    effects: Array
    slope: Array


class Mixture(Module):
    """`weights`, ordered `means` and `scales`, of shape (components,)."""

    weights: Array
    means: Array
    scales: Array


class CorrelatedNormal(Module):
    """`scales` of shape (size,), and the `cholesky` factor of a correlation matrix of that size."""

    scales: Array
    cholesky: Array


class Categorical(Module):
    """`probabilities` of shape (classes,)."""

    probabilities: Array


def logistic_regression(size: int = 8, points: int = 200) -> Problem:
    """`weights` and `intercept` ~ Normal(0, 1); `y` ~ Bernoulli(sigmoid(x @ weights +
    intercept)).
    """

    def log_density(unknowns: Logistic, data: tuple[Array, Array]) -> Array:
        x, y = data
        prior = density.normal(unknowns.weights, 0.0, 1.0)
        prior += density.normal(unknowns.intercept, 0.0, 1.0)
        return prior + density.bernoulli(y, x @ unknowns.weights + unknowns.intercept)

    def start() -> tuple[Logistic, tuple[Array, Array]]:
        draw = np.random.default_rng(1)
        x, weights = draw.normal(size=(points, size)), draw.normal(size=size)
        y = draw.uniform(size=points) < 1 / (1 + np.exp(-x @ weights))
        first = Logistic(single(draw.normal(size=size)), single(0.3))
        return first, (single(x), single(y))

    return Problem("logistic regression", log_density, start)


def eight_schools() -> Problem:
    """Rubin (1981): `mean` ~ Normal(0, 5), `scale` ~ HalfCauchy(5), `effects` ~ Normal(mean,
    scale); `y` ~ Normal(effects, errors).
    """

    def log_density(unknowns: EightSchools, data: tuple[Array, Array]) -> Array:
        y, errors = data
        prior = density.normal(unknowns.mean, 0.0, 5.0)
        prior += density.half_cauchy(unknowns.scale, 5.0)
        prior += density.normal(unknowns.effects, unknowns.mean, unknowns.scale)
        return prior + density.normal(y, unknowns.effects, errors)

    def start() -> tuple[EightSchools, tuple[Array, Array]]:
        effects = np.random.default_rng(2).normal(4, 3, 8)
        first = EightSchools(single(4.0), single(3.0), single(effects))
        y, errors = (28, 8, -3, 7, -1, 1, 18, 12), (15, 10, 16, 11, 9, 11, 10, 18)
        return first, (single(y), single(errors))

    return Problem("eight schools", log_density, start, {"scale": "positive"})


def hierarchical_poisson(groups: int = 10, points: int = 200) -> Problem:
    """`mean` and `slope` ~ Normal(0, 1), `scale` ~ HalfNormal(1), `effects` ~ Normal(mean, scale);
    `y` ~ Poisson(exp(effects[group] + slope * x)).
    """

    def log_density(unknowns: HierarchicalPoisson, data: tuple[Array, Array, Array]) -> Array:
        group, x, y = data
        prior = density.normal(unknowns.mean, 0.0, 1.0)
        prior += density.normal(unknowns.slope, 0.0, 1.0)
        prior += density.half_normal(unknowns.scale, 1.0)
        prior += density.normal(unknowns.effects, unknowns.mean, unknowns.scale)
        return prior + density.poisson(y, unknowns.effects[group] + unknowns.slope * x)

    def start() -> tuple[HierarchicalPoisson, tuple[Array, Array, Array]]:
        draw = np.random.default_rng(3)
        group, x = draw.integers(groups, size=points), draw.normal(size=points)
        effects = draw.normal(0.5, 0.7, groups)
        y = draw.poisson(np.exp(effects[group] + 0.4 * x))
        nearby = effects + draw.normal(0, 0.2, groups)
        first = HierarchicalPoisson(single(0.4), single(0.6), single(nearby), single(0.3))
        return first, (jnp.asarray(group, jnp.int32), single(x), single(y))

    return Problem("hierarchical Poisson", log_density, start, {"scale": "positive"})


def gaussian_mixture(points: int = 200) -> Problem:
    """`weights` ~ Dirichlet(2), `means` ~ Normal(0, 5) in order, `scales` ~ HalfNormal(2); each `y`
    is normal around the mean of one of three components.

    The density of the ordered means is not multiplied by the number of permutations.
    """

    def log_density(unknowns: Mixture, data: tuple[Array]) -> Array:
        (y,) = data
        prior = density.dirichlet(unknowns.weights, 2.0)
        prior += density.normal(unknowns.means, 0.0, 5.0)
        prior += density.half_normal(unknowns.scales, 2.0)
        each = density.normal_each(y[:, None], unknowns.means[None], unknowns.scales[None])
        joint = jnp.log(unknowns.weights)[None] + each
        return prior + jnp.sum(jax.nn.logsumexp(joint, axis=1))

    def start() -> tuple[Mixture, tuple[Array]]:
        draw = np.random.default_rng(4)
        component = draw.choice(3, points, p=(0.5, 0.3, 0.2))
        y = draw.normal(np.array([-2, 0.5, 4])[component], np.array([0.7, 1, 0.5])[component])
        first = Mixture(
            single((0.4, 0.35, 0.25)), single((-1.5, 0.2, 3.5)), single((0.9, 0.8, 0.7))
        )
        return first, (single(y),)

    constraints = {"weights": "simplex", "means": "ordered_vector", "scales": "positive"}
    return Problem("Gaussian mixture, ordered means", log_density, start, constraints)


def lkj_normal(size: int = 4, points: int = 100) -> Problem:
    """`scales` ~ HalfCauchy(2), `cholesky` ~ LKJ(2); `y` ~ Normal(0, S S') with S = diag(scales)
    cholesky.
    """

    def log_density(unknowns: CorrelatedNormal, data: tuple[Array]) -> Array:
        (y,) = data
        prior = density.half_cauchy(unknowns.scales, 2.0)
        prior += density.lkj_cholesky(unknowns.cholesky, 2.0)
        scaled = unknowns.scales[:, None] * unknowns.cholesky
        return prior + density.correlated_normal(y, scaled)

    def start() -> tuple[CorrelatedNormal, tuple[Array]]:
        draw = np.random.default_rng(5)
        factor = np.tril(draw.normal(size=(size, size)), -1) + 2 * np.eye(size)
        factor /= np.linalg.norm(factor, axis=1, keepdims=True)
        y = draw.normal(size=(points, size)) @ factor.T
        first = CorrelatedNormal(single(draw.uniform(0.7, 1.4, size)), single(factor))
        return first, (single(y),)

    constraints = {"scales": "positive", "cholesky": "corr_cholesky"}
    return Problem("LKJ-correlated normal", log_density, start, constraints)


def dirichlet_categorical(classes: int = 6, points: int = 200) -> Problem:
    """`probabilities` ~ Dirichlet(1.5); `y` ~ Categorical(probabilities)."""

    def log_density(unknowns: Categorical, data: tuple[Array]) -> Array:
        (y,) = data
        prior = density.dirichlet(unknowns.probabilities, 1.5)
        return prior + jnp.sum(jnp.log(unknowns.probabilities)[y])

    def start() -> tuple[Categorical, tuple[Array]]:
        draw = np.random.default_rng(6)
        y = draw.choice(classes, points, p=draw.dirichlet(np.full(classes, 2.0)))
        first = Categorical(single(draw.dirichlet(np.full(classes, 5.0))))
        return first, (jnp.asarray(y, jnp.int32),)

    return Problem("Dirichlet-categorical", log_density, start, {"probabilities": "simplex"})


# --- series ---


class Garch(Module):
    """The `mean` of the returns, the `base` of their variance, and `weights` of shape (3,): of the
    last squared deviation, of the last variance, and the remainder to 1.
    """

    mean: Array
    base: Array
    weights: Array


class HiddenMarkov(Module):
    """`transition`, whose rows are distributions, ordered `means` of the states, and `scale`."""

    transition: Array
    means: Array
    scale: Array


def garch(length: int = 200) -> Problem:
    """Bollerslev (1986), GARCH(1, 1): `mean` ~ Normal(0, 1), `base` ~ HalfNormal(1), `weights` ~
    Dirichlet(2); each return ~ Normal(mean, sqrt(variance)), where

        variance[0] = base / weights[2]
        variance[t] = base + weights[0] (y[t - 1] - mean)**2 + weights[1] variance[t - 1].
    """

    def log_density(unknowns: Garch, data: tuple[Array]) -> Array:
        (y,) = data
        squares = (y - unknowns.mean) ** 2

        def step(variance: Array, square: Array) -> tuple[Array, Array]:
            deviation, memory, _ = unknowns.weights
            return unknowns.base + deviation * square + memory * variance, variance

        _, variances = jax.lax.scan(step, unknowns.base / unknowns.weights[2], squares)
        prior = density.normal(unknowns.mean, 0.0, 1.0)
        prior += density.half_normal(unknowns.base, 1.0)
        prior += density.dirichlet(unknowns.weights, 2.0)
        return prior + density.normal(y, unknowns.mean, jnp.sqrt(variances))

    def start() -> tuple[Garch, tuple[Array]]:
        draw = np.random.default_rng(8)
        y, variance = np.zeros(length), 1.0
        for step in range(length):
            y[step] = 0.1 + math.sqrt(variance) * draw.normal()
            variance = 0.2 + 0.3 * (y[step] - 0.1) ** 2 + 0.5 * variance
        return Garch(single(0.2), single(0.3), single((0.25, 0.45, 0.3))), (single(y),)

    constraints = {"base": "positive", "weights": "simplex"}
    return Problem("GARCH", log_density, start, constraints)


def hidden_markov(states: int = 3, length: int = 100) -> Problem:
    """Rows of `transition` ~ Dirichlet(1.5), `means` ~ Normal(0, 5) in order, `scale` ~
    HalfNormal(2). The chain has a uniform initial state, and `y` ~ Normal(means[state], scale) at
    each step.

    The forward algorithm (Rabiner 1989) sums over the states.
    """

    def log_density(unknowns: HiddenMarkov, data: tuple[Array]) -> Array:
        (y,) = data
        log_transition = jnp.log(unknowns.transition)

        def emission(y: Array) -> Array:
            return density.normal_each(y, unknowns.means, unknowns.scale)

        def step(log_forward: Array, y: Array) -> tuple[Array, None]:
            reached = jax.nn.logsumexp(log_forward[:, None] + log_transition, axis=0)
            return reached + emission(y), None

        log_forward, _ = jax.lax.scan(step, emission(y[0]) - math.log(states), y[1:])
        prior = density.dirichlet(unknowns.transition, 1.5)
        prior += density.normal(unknowns.means, 0.0, 5.0)
        prior += density.half_normal(unknowns.scale, 2.0)
        return prior + jax.nn.logsumexp(log_forward)

    def start() -> tuple[HiddenMarkov, tuple[Array]]:
        draw = np.random.default_rng(9)
        stays = np.eye(states) * 0.7 + 0.3 / states
        chain = [0]
        for _ in range(length - 1):
            chain.append(draw.choice(states, p=stays[chain[-1]]))
        y = 3.0 * np.array(chain) + draw.normal(0, 0.8, length)
        transition = np.eye(states) * 0.4 + 0.6 * draw.dirichlet(np.full(states, 4.0), states)
        first = HiddenMarkov(single(transition), single(2.5 * np.arange(states) + 0.3), single(1.0))
        return first, (single(y),)

    constraints = {"transition": "simplex", "means": "ordered_vector", "scale": "positive"}
    return Problem("hidden Markov model", log_density, start, constraints)
