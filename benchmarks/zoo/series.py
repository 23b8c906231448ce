"""The models of the zoo for time series. Their log densities use `jax.lax.scan`."""

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from benchmarks.zoo import densities as density
from benchmarks.zoo.problem import Problem, single
from eqxlike import Module


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
