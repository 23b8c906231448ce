"""Markov chains that move by gradients of minibatches: SGLD and SGHMC."""

import abc
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import jax.random as jr
from jaxtyping import Array, Float, PRNGKeyArray

from ..._numbers import positive_number, real_number, whole_number
from .._blackjax import blackjax
from .._inference import Problem, Record
from ._hamiltonian import MarkovChain
from ._map import DeepEnsemble, check_batch_size

Place = Float[Array, " d"]


class StochasticGradient(MarkovChain):
    """The base of SGLD and SGHMC. A step refuses nothing, and needs the gradient of a batch alone.

    - `num_samples`: draws that each chain keeps.
    - `num_warmup`: steps before that.
    - `chains`: how many there are.
    - `thin`: of how many steps one is kept.
    - `step_size`: as a learning rate: of gradient descent on minus the log density over `N`, the
      number of examples. It is the same for more data of the same kind.
    - `decay`: the step size of step `t` is `step_size * (1 + t / num_warmup)**-decay`; 0 for a
      constant one.
    - `batch_size`: examples in a gradient, drawn with replacement; all of them by default.
    - `temperature`: the posterior is found to the power of `1 / temperature`.
    - `descent_steps`: of `bayes.MAP`, from where the chain begins to a mode.
    """

    num_warmup: int = 5000
    thin: int = 50
    step_size: float = 1e-3
    decay: float = 0.0
    batch_size: int | None = None
    temperature: float = 1.0
    descent_steps: int = 1000

    def __check_init__(self):
        name = type(self).__name__
        positive_number(self.step_size, f"{name}: step_size")
        positive_number(self.temperature, f"{name}: temperature")
        if not 0 <= real_number(self.decay, f"{name}: decay") <= 1:
            raise ValueError(f"{name}: decay must lie in [0, 1], got {self.decay}.")
        whole_number(self.descent_steps, f"{name}: descent_steps", least=0)
        check_batch_size(self, self.batch_size)

    def check(self, problem: Problem) -> None:
        check_batch_size(self, self.batch_size, problem)

    def init(self, problem: Problem, key: PRNGKeyArray) -> Place:
        place_key, key = jr.split(key)
        if not self.descent_steps:
            return problem.redrawn(place_key)
        # Chains begin where the members of an ensemble end.
        descent = DeepEnsemble(steps=self.descent_steps, batch_size=self.batch_size)

        def one(index: Array, state: Any) -> Any:
            return descent.step(problem, state, index, jr.fold_in(key, index))[0]

        first = descent.init(problem, place_key)
        return jax.lax.fori_loop(0, self.descent_steps, one, first).place

    def step(
        self, problem: Problem, state: Place, index: Array, key: PRNGKeyArray
    ) -> tuple[Place, Record]:
        batch_key, key = jr.split(key)
        batch = problem.batch(batch_key, self.batch_size)

        def gradient(place: Place, batch: Any) -> Place:
            return jax.grad(lambda place: problem.batch_log_density(place, batch))(place)

        shrunk = (1 + index / max(1, self.num_warmup)) ** -self.decay
        place = self.move(
            key, state, gradient, batch, self.step_size * shrunk, problem.target.num_data
        )
        place = place.astype(state.dtype)
        return place, {"draw": place}

    @abc.abstractmethod
    def move(
        self,
        key: PRNGKeyArray,
        place: Place,
        gradient: Callable[[Place, Any], Place],
        batch: Any,
        step_size: Array,
        num_data: int,
    ) -> Place:
        """One transition by BlackJAX."""


# --- Stochastic gradient Langevin dynamics ---


class SGLD(StochasticGradient):
    """Stochastic gradient Langevin dynamics: gradient descent with noise of the right size.

    A step goes `step_size` times the gradient of the log density over `N`, the number of examples,
    and by normal noise of variance `2 * step_size * temperature / N` (Welling and Teh, 2011,
    "Bayesian Learning via Stochastic Gradient Langevin Dynamics"; BlackJAX's implementation).
    It serves data that is too much for one gradient. It is biased: of a normal posterior of
    precision `P` it finds the covariance `(P (I - step_size P / (2 N)))^-1`, and minibatches widen
    it further. A step size that is too large leads to infinity, one that is too small nowhere.

    - `num_samples`: draws that each chain keeps.
    - `num_warmup`: steps before that.
    - `chains`: how many there are.
    - `thin`: of how many steps one is kept.
    - `step_size`: as a learning rate: of gradient descent on minus the log density over `N`. It is
      the same for more data of the same kind.
    - `decay`: the step size of step `t` is `step_size * (1 + t / num_warmup)**-decay`; 0 for a
      constant one. All draws count alike.
    - `batch_size`: examples in a gradient, drawn with replacement; all of them by default.
    - `temperature`: the posterior is found to the power of `1 / temperature`.
    - `descent_steps`: of Adam, from where the chain begins to a mode, before its first step.

    >>> from eqxlike import bayes
    >>> method = bayes.SGLD(step_size=1e-3, batch_size=64)
    """

    def move(
        self,
        key: PRNGKeyArray,
        place: Place,
        gradient: Callable[[Place, Any], Place],
        batch: Any,
        step_size: Array,
        num_data: int,
    ) -> Place:
        kernel = blackjax().sgmcmc.sgld.build_kernel()
        return kernel(key, place, gradient, batch, step_size / num_data, self.temperature)


# --- Stochastic gradient Hamiltonian Monte Carlo ---


class SGHMC(StochasticGradient):
    """Stochastic gradient Hamiltonian Monte Carlo: gradient descent with momentum and noise.

    With momentum a chain goes further than that of `bayes.SGLD` before it forgets where to. Noise
    makes up for what friction takes (Chen, Fox and Guestrin, 2014, "Stochastic Gradient Hamiltonian
    Monte Carlo"; BlackJAX's implementation). It is biased: the variance along a direction in which
    the posterior has precision `p` is too large by about `step_size * p / (N friction)` of itself,
    `N` the number of examples, and at 1 the chain leaves for infinity.

    - `friction`: the part of the momentum that a gradient loses: 1 less the momentum of an
      optimiser.
    - `trajectory_steps`: gradients in a step, at whose beginning the momentum is drawn again.

    The other fields are those of `bayes.SGLD`. The step size is a learning rate here too: what a
    gradient adds to the momentum.

    >>> from eqxlike import bayes
    >>> method = bayes.SGHMC(step_size=1e-4, batch_size=64)
    """

    num_warmup: int = 1000
    thin: int = 2
    step_size: float = 3e-4
    friction: float = 0.1
    trajectory_steps: int = 30

    def __check_init__(self):
        if not positive_number(self.friction, "SGHMC: friction") <= 1:
            raise ValueError(f"SGHMC: friction must lie in (0, 1], got {self.friction}.")
        whole_number(self.trajectory_steps, "SGHMC: trajectory_steps")

    def move(
        self,
        key: PRNGKeyArray,
        place: Place,
        gradient: Callable[[Place, Any], Place],
        batch: Any,
        step_size: Array,
        num_data: int,
    ) -> Place:
        # BlackJAX draws momenta of temperature 1, and so the density is tempered instead. Its steps
        # are those of a time `dt`, with which momentum and place change by `dt` and `dt**2`.
        dt = jnp.sqrt(step_size * self.temperature / num_data)
        kernel = blackjax().sgmcmc.sghmc.build_kernel(alpha=self.friction / dt)
        return kernel(
            key,
            place,
            lambda place, batch: gradient(place, batch) / self.temperature,
            batch,
            dt,
            self.trajectory_steps,
        )
