"""Hamiltonian Monte Carlo."""

from typing import Any

import jax.random as jr
from jaxtyping import Array, PRNGKeyArray

from ..._numbers import whole_number
from .._blackjax import blackjax
from ._hamiltonian import Hamiltonian


class HMC(Hamiltonian):
    """Hamiltonian Monte Carlo with trajectories of random length.

    It is exact but for Monte Carlo error. A trajectory has a number of steps that is drawn evenly
    from 1 to `trajectory_steps`: of one length it could come back to where it began. `bayes.NUTS`
    finds the length by itself (Neal, 2011, "MCMC Using Hamiltonian Dynamics"; BlackJAX's
    implementation).

    - `num_samples`: draws that each chain keeps.
    - `num_warmup`: steps before that, in which step size and mass matrix are adapted.
    - `chains`: how many there are.
    - `thin`: of how many steps one is kept.
    - `target_acceptance`: the acceptance rate that the step size is chosen for. The nearer to 1,
      the smaller the steps.
    - `dense_mass`: whether the mass matrix has correlations: slower steps, of which fewer are
      needed.
    - `step_size`: with which warm-up begins. With `num_warmup=0` nothing is adapted: it is that of
      all steps, in the unit of unknowns in linked space, and the mass matrix is the identity;
      choose it so that `diagnostics.acceptance` lies near `target_acceptance`.
    - `trajectory_steps`: the most gradients that a trajectory takes.

    >>> from eqxlike import bayes
    >>> method = bayes.HMC(num_samples=500, trajectory_steps=16)
    """

    trajectory_steps: int = 32

    def __check_init__(self):
        whole_number(self.trajectory_steps, "HMC: trajectory_steps")

    def move(
        self, key: PRNGKeyArray, chain: Any, log_density: Any, step_size: Array, inverse_mass: Array
    ) -> tuple[Any, Any]:
        length_key, key = jr.split(key)
        num_steps = jr.randint(length_key, (), 1, self.trajectory_steps + 1)
        kernel = blackjax().mcmc.hmc.build_kernel()
        return kernel(key, chain, log_density, step_size, inverse_mass, num_steps)
