"""Hamiltonian Monte Carlo, and the warm-up that HMC and NUTS share."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jaxtyping import Array, Float, PRNGKeyArray

from ..._check_numbers import positive_number, whole_number
from .._inference._method import Problem, Step
from .._libraries import blackjax, hmc_util
from ._markov_chains import MarkovChain


class HamiltonianState(NamedTuple):
    """The state of a chain and of its warm-up.

    - `place`, `log_density`, `gradient`: the position, the log density, and the gradient of the log
      density.
    - `step_size`, `inverse_mass_matrix`: step size and inverse mass matrix of the leapfrog
      integrator.
    - `averaging`: state of dual averaging, which adapts the step size.
    - `moments`: moments of the positions in the current warm-up window, for the mass matrix.
    """

    place: Float[Array, " d"]
    log_density: Float[Array, ""]
    gradient: Float[Array, " d"]
    step_size: Float[Array, ""]
    inverse_mass_matrix: Float[Array, " d"] | Float[Array, "d d"]
    averaging: Any
    moments: Any


class Hamiltonian(MarkovChain):
    """Base of HMC and NUTS, with the fields of `bayes.NUTS`.

    Warm-up adapts step size and mass matrix as Stan does (Carpenter et al., 2017, "Stan: A
    Probabilistic Programming Language", section 3).
    """

    target_acceptance: float = 0.8
    dense_mass: bool = False
    step_size: float = 1.0

    def __check_init__(self):
        positive_number(self.step_size, f"{type(self).__name__}: step_size")
        name = f"{type(self).__name__}: target_acceptance"
        if not positive_number(self.target_acceptance, name) < 1:
            raise ValueError(f"{name} must be less than 1, got {self.target_acceptance}.")

    def init(self, problem: Problem, key: PRNGKeyArray) -> HamiltonianState:
        place = problem.dispersed(key)
        matrix = jnp.eye(problem.size) if self.dense_mass else jnp.ones(problem.size)
        return HamiltonianState(
            place,
            *jax.value_and_grad(problem.log_density)(place),
            jnp.asarray(self.step_size, problem.dtype),
            matrix.astype(problem.dtype),
            self._averaging(jnp.log(self.step_size)),
            self._moments()[0](matrix.shape),
        )

    # --- warm-up ---

    def _averaging(self, log_step_size: Array) -> Any:
        """The initial state of dual averaging."""
        return hmc_util().dual_averaging()[0](log_step_size + jnp.log(10.0))

    def _moments(self) -> Any:
        return hmc_util().welford_covariance(diagonal=not self.dense_mass)

    def gathered(
        self, state: HamiltonianState, index: Array, acceptance: Array
    ) -> tuple[HamiltonianState, Array]:
        """Adapts to one step of warm-up.

        Also returns True if a window ends, so that `closed` must be called.
        """
        # The first and the last window adapt only the step size.
        windows = hmc_util().build_adaptation_schedule(self.num_warmup)[1:-1]
        starts, ends = np.array(windows, int).reshape(-1, 2).T
        index = jnp.minimum(index, self.num_warmup - 1)

        _, update = hmc_util().dual_averaging()
        averaging = update(self.target_acceptance - acceptance, state.averaging)
        log_step_size, average, *_ = averaging
        log_step_size = jnp.where(index == self.num_warmup - 1, average, log_step_size)
        moments = jax.lax.cond(
            jnp.any((starts <= index) & (index <= ends)),
            lambda: self._moments()[1](state.place, state.moments),
            lambda: state.moments,
        )
        step_size = jnp.exp(log_step_size).astype(state.step_size.dtype)
        state = state._replace(averaging=averaging, step_size=step_size, moments=moments)
        return state, jnp.any(index == ends)

    def closed(self, state: HamiltonianState) -> HamiltonianState:
        """Ends a warm-up window: updates the mass matrix and restarts dual averaging."""
        start, _, covariance = self._moments()
        matrix, *_ = covariance(state.moments, regularize=True)
        average = state.averaging[1]
        return state._replace(
            step_size=jnp.exp(average).astype(state.step_size.dtype),
            inverse_mass_matrix=matrix.astype(state.inverse_mass_matrix.dtype),
            averaging=self._averaging(average),
            moments=start(matrix.shape),
        )


# --- Hamiltonian Monte Carlo ---


class HMC(Hamiltonian):
    """Hamiltonian Monte Carlo: exact up to Monte Carlo error, with a cost known in advance.

    A step costs on average `trajectory_steps / 2` gradients of all examples. A kept draw needs as
    much memory as the unknowns. If you do not know a good trajectory length, use `bayes.NUTS`,
    which adapts the length. (Neal, 2011, "MCMC Using Hamiltonian Dynamics"; BlackJAX's
    implementation.)

    The number of leapfrog steps of a trajectory is uniform between 1 and `trajectory_steps`,
    because trajectories of a fixed length may return to their start.

    - `trajectory_steps`: maximum number of leapfrog steps in a trajectory.

    The other fields are described in `bayes.NUTS`. There is no field `max_doublings`.

    >>> from eqxlike import bayes
    >>> method = bayes.HMC(num_samples=500, trajectory_steps=16)
    """

    trajectory_steps: int = 32

    def __check_init__(self):
        whole_number(self.trajectory_steps, "HMC: trajectory_steps")

    def step(
        self, problem: Problem, state: HamiltonianState, index: Array, key: PRNGKeyArray
    ) -> Step:
        length_key, key = jr.split(key)
        num_steps = jr.randint(length_key, (), 1, self.trajectory_steps + 1)
        hmc, adapted = blackjax().mcmc.hmc, (state.step_size, state.inverse_mass_matrix)
        chain = hmc.HMCState(*state[:3])
        chain, info = hmc.build_kernel()(key, chain, problem.log_density, *adapted, num_steps)
        state = state._replace(
            place=chain.position, log_density=chain.logdensity, gradient=chain.logdensity_grad
        )
        if self.num_warmup:
            state = jax.lax.cond(
                index < self.num_warmup,
                lambda state: self._learn(state, index, info.acceptance_rate),
                lambda state: state,
                state,
            )
        record = {
            "draw": state.place,
            "log_density": state.log_density,
            "acceptance": info.acceptance_rate,
            "is_divergent": info.is_divergent,
            "energy": info.energy,
            "num_gradients": info.num_integration_steps,
        }
        return state, record

    def _learn(self, state: HamiltonianState, index: Array, acceptance: Array) -> HamiltonianState:
        state, is_end = self.gathered(state, index, acceptance)
        return jax.lax.cond(is_end, self.closed, lambda state: state, state)
