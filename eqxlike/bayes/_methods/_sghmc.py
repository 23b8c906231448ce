"""Stochastic gradient Hamiltonian Monte Carlo."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, PRNGKeyArray

from ..._numbers import positive_number, whole_number
from .._blackjax import blackjax
from ._stochastic_gradient import Place, StochasticGradient


class SGHMC(StochasticGradient):
    """Stochastic gradient Hamiltonian Monte Carlo: gradient descent with momentum and noise.

    With momentum a chain goes further than that of `bayes.SGLD` before it forgets where to. Noise
    makes up for what friction takes (Chen, Fox and Guestrin, 2014, "Stochastic Gradient Hamiltonian
    Monte Carlo"; BlackJAX's implementation). It is biased: the variance along a direction in which
    the posterior has precision `p` is too large by about `step_size * p / (N friction)` of itself,
    `N` the number of examples, and at 1 the chain leaves for infinity.

    - `friction`: the part of the momentum that a gradient loses: 1 less the momentum of an
      optimiser.
    - `trajectory_steps`: gradients in a step, at whose beginning the momentum is drawn anew.

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
