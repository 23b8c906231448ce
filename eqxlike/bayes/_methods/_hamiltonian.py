"""Hamiltonian Monte Carlo, and the warm-up that it shares with NUTS."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jax.random as jr
from jaxtyping import Array, Float, PRNGKeyArray

from ..._check_numbers import positive_number, whole_number
from .._inference._method import Problem, Step
from .._libraries import blackjax
from ._markov_chains import MarkovChain


class HamiltonianState(NamedTuple):
    """A chain and what its warm-up has learnt.

    - `chain`: place, log density and gradient, as BlackJAX has them.
    - `step_size`, `inverse_mass_matrix`: with which it moves.
    - `step_sizes`, `masses`: how the two are learnt.
    """

    chain: Any
    step_size: Float[Array, ""]
    inverse_mass_matrix: Float[Array, " d"] | Float[Array, "d d"]
    step_sizes: Any
    masses: Any


class Hamiltonian(MarkovChain):
    """The base of HMC and NUTS. The fields are those of `bayes.NUTS`.

    Warm-up adapts step size and mass matrix (Carpenter et al., 2017, "Stan: A Probabilistic
    Programming Language", section 3).
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
        chain = blackjax().mcmc.nuts.init(place, problem.log_density)
        step_sizes, masses = self._adaptation()
        mass_state = masses.init(problem.size)
        first = jnp.asarray(self.step_size, problem.dtype)
        return HamiltonianState(
            chain, first, mass_state.inverse_mass_matrix, step_sizes.init(first), mass_state
        )

    # --- the warm-up ---

    def _adaptation(self) -> tuple["_Adaptation", "_Adaptation"]:
        adaptation = blackjax().adaptation
        dual_averaging = adaptation.step_size.dual_averaging_adaptation(self.target_acceptance)
        masses = adaptation.mass_matrix.mass_matrix_adaptation(not self.dense_mass)
        return _Adaptation(*dual_averaging), _Adaptation(*masses)

    def gathered(
        self, state: HamiltonianState, index: Array, acceptance: Array
    ) -> tuple[HamiltonianState, Array]:
        """What a step of warm-up teaches, and whether a window ends that `closed` closes."""
        step_sizes, masses = self._adaptation()
        schedule = blackjax().adaptation.window_adaptation.build_schedule(self.num_warmup)
        index = jnp.minimum(index, self.num_warmup - 1)
        stage, is_end = jnp.asarray(schedule)[index]

        learnt = step_sizes.update(state.step_sizes, acceptance)
        is_last = index == self.num_warmup - 1
        step_size = jnp.where(is_last, step_sizes.final(learnt), jnp.exp(learnt.log_step_size))
        gathered = jax.lax.cond(
            stage == 1,
            lambda: masses.update(state.masses, state.chain.position),
            lambda: state.masses,
        )
        state = state._replace(step_sizes=learnt, step_size=step_size, masses=gathered)
        return state, is_end == 1

    def closed(self, state: HamiltonianState) -> HamiltonianState:
        """The end of a window: another mass matrix, and the step size is learnt again."""
        step_sizes, masses = self._adaptation()
        mass = masses.final(state.masses)
        again = step_sizes.init(step_sizes.final(state.step_sizes))
        return state._replace(
            masses=mass,
            inverse_mass_matrix=mass.inverse_mass_matrix,
            step_sizes=again,
            step_size=jnp.exp(again.log_step_size),
        )


class _Adaptation(NamedTuple):
    init: Any
    update: Any
    final: Any


# --- Hamiltonian Monte Carlo ---


class HMC(Hamiltonian):
    """Hamiltonian Monte Carlo, exact but for Monte Carlo error, at a cost known beforehand.

    A step costs half of `trajectory_steps` gradients of all examples on average, and a kept draw
    the memory of the unknowns. Do not use it where you do not know the length: `bayes.NUTS` finds
    it (Neal, 2011, "MCMC Using Hamiltonian Dynamics"; BlackJAX's implementation).

    A trajectory has a number of steps drawn evenly from 1 to `trajectory_steps`: of one length it
    could come back to where it began.

    - `trajectory_steps`: the most gradients that a trajectory takes.

    The other fields are those of `bayes.NUTS`, without `max_doublings`.

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
        adapted = state.step_size, state.inverse_mass_matrix
        kernel = blackjax().mcmc.hmc.build_kernel()
        chain, info = kernel(key, state.chain, problem.log_density, *adapted, num_steps)
        state = state._replace(chain=chain)
        if self.num_warmup:
            state = jax.lax.cond(
                index < self.num_warmup,
                lambda state: self._learn(state, index, info.acceptance_rate),
                lambda state: state,
                state,
            )
        record = {
            "draw": chain.position,
            "log_density": chain.logdensity,
            "acceptance": info.acceptance_rate,
            "is_divergent": info.is_divergent,
            "energy": info.energy,
            "num_gradients": info.num_integration_steps,
        }
        return state, record

    def _learn(self, state: HamiltonianState, index: Array, acceptance: Array) -> HamiltonianState:
        state, is_end = self.gathered(state, index, acceptance)
        return jax.lax.cond(is_end, self.closed, lambda state: state, state)
