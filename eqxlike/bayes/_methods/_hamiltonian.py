"""Hamiltonian Monte Carlo with the warm-up of Stan: a step size and a mass matrix are found."""

import abc
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

from ..._numbers import positive_number
from .._blackjax import blackjax
from .._inference import Problem, Record
from ._chain import MarkovChain


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
    """The base of HMC and NUTS.

    - `num_samples`: draws that each chain keeps.
    - `num_warmup`: steps before that, in which step size and mass matrix are adapted (Carpenter et
      al., 2017, "Stan: A Probabilistic Programming Language", section 3).
    - `chains`: how many there are.
    - `thin`: of how many steps one is kept.
    - `target_acceptance`: the acceptance rate that the step size is chosen for. The nearer to 1,
      the smaller the steps.
    - `dense_mass`: whether the mass matrix has correlations: slower steps, of which fewer are
      needed.
    - `step_size`: with which warm-up begins. With `num_warmup=0` nothing is adapted: it is that of
      all steps, in the unit of unknowns in linked space, and the mass matrix is the identity;
      choose it so that `diagnostics.acceptance` lies near `target_acceptance`.
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

    def step(
        self, problem: Problem, state: HamiltonianState, index: Array, key: PRNGKeyArray
    ) -> tuple[HamiltonianState, Record]:
        chain, info = self.move(
            key, state.chain, problem.log_density, state.step_size, state.inverse_mass_matrix
        )
        state = state._replace(chain=chain)
        if self.num_warmup:
            is_warmup = index < self.num_warmup
            learnt = functools.partial(self._learn, index=index, acceptance=info.acceptance_rate)
            state = jax.lax.cond(is_warmup, learnt, lambda state: state, state)
        record = {
            "draw": chain.position,
            "log_density": chain.logdensity,
            "acceptance": info.acceptance_rate,
            "is_divergent": info.is_divergent,
            "energy": info.energy,
            "num_gradients": info.num_integration_steps,
        }
        return state, record

    @abc.abstractmethod
    def move(
        self, key: PRNGKeyArray, chain: Any, log_density: Any, step_size: Array, inverse_mass: Array
    ) -> tuple[Any, Any]:
        """One transition by BlackJAX: the chain after it, and what happened."""

    # --- the warm-up ---

    def _adaptation(self) -> tuple[Any, Any]:
        adaptation = blackjax().adaptation
        dual_averaging = adaptation.step_size.dual_averaging_adaptation(self.target_acceptance)
        masses = adaptation.mass_matrix.mass_matrix_adaptation(not self.dense_mass)
        return _Adaptation(*dual_averaging), _Adaptation(*masses)

    def _learn(self, state: HamiltonianState, index: Array, acceptance: Array) -> HamiltonianState:
        step_sizes, masses = self._adaptation()
        schedule = blackjax().adaptation.window_adaptation.build_schedule(self.num_warmup)
        index = jnp.minimum(index, self.num_warmup - 1)
        stage, is_end = jnp.asarray(schedule)[index]

        learnt = step_sizes.update(state.step_sizes, acceptance)
        state = state._replace(step_sizes=learnt, step_size=jnp.exp(learnt.log_step_size))
        gathered = jax.lax.cond(
            stage == 1,
            lambda: masses.update(state.masses, state.chain.position),
            lambda: state.masses,
        )
        state = state._replace(masses=gathered)

        def close(state: HamiltonianState) -> HamiltonianState:
            mass = masses.final(state.masses)
            again = step_sizes.init(step_sizes.final(state.step_sizes))
            return state._replace(
                masses=mass,
                inverse_mass_matrix=mass.inverse_mass_matrix,
                step_sizes=again,
                step_size=jnp.exp(again.log_step_size),
            )

        state = jax.lax.cond(is_end == 1, close, lambda state: state, state)
        is_last = index == self.num_warmup - 1
        average = step_sizes.final(state.step_sizes)
        return state._replace(step_size=jnp.where(is_last, average, state.step_size))


class _Adaptation(NamedTuple):
    init: Any
    update: Any
    final: Any
