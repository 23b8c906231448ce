"""Microcanonical Langevin Monte Carlo."""

from typing import Any, NamedTuple

import jax.random as jr
from jaxtyping import Array, Float, PRNGKeyArray

from ..._numbers import positive_number
from .._blackjax import blackjax
from .._inference import Problem, Record
from ._chain import MarkovChain

# BlackJAX's three phases of tuning take a tenth of this number of steps each, and a third of such a
# tenth more.
_STEPS_OF_TUNING = 3


class MicrocanonicalState(NamedTuple):
    """A chain and what its tuning has found.

    - `chain`: place, direction, log density and gradient, as BlackJAX has them.
    - `length`: after about which way the direction is forgotten.
    - `step_size`: of the way, how much a step goes.
    - `inverse_mass_matrix`: its diagonal.
    """

    chain: Any
    length: Float[Array, ""]
    step_size: Float[Array, ""]
    inverse_mass_matrix: Float[Array, " d"]


class MCLMC(MarkovChain):
    """Microcanonical Langevin Monte Carlo: at a constant speed, with one gradient a step.

    No step is refused, so that draws have a small bias that the step size bounds: it is chosen for
    an error in energy whose variance, by unknown, is `energy_variance`. For networks of many
    unknowns it needs far fewer gradients than `bayes.NUTS` (Robnik, De Luca, Silverstein and
    Seljak, 2023, "Microcanonical Hamiltonian Monte Carlo"; BlackJAX's implementation).

    - `num_samples`: draws that each chain keeps.
    - `num_warmup`: steps before that, in which step size, length and a diagonal mass matrix are
      tuned. They are made at once, before the bar moves.
    - `chains`: how many there are.
    - `thin`: of how many steps one is kept.
    - `energy_variance`: in squared nats for each unknown. The smaller, the smaller the bias, and
      the step.

    >>> from eqxlike import bayes
    >>> method = bayes.MCLMC(num_samples=500, thin=20)
    """

    num_warmup: int = 5000
    thin: int = 10
    energy_variance: float = 5e-4

    def __check_init__(self):
        positive_number(self.energy_variance, "MCLMC: energy_variance")
        if self.num_warmup < 100:
            raise ValueError(
                f"MCLMC: num_warmup must be at least 100, got {self.num_warmup}: step size, length "
                "and mass matrix are tuned by it."
            )

    @property
    def num_steps(self) -> int:
        return self.num_samples * self.thin

    @property
    def num_dropped(self) -> int:
        return 0

    def check(self, problem: Problem) -> None:
        if problem.size < 2:
            raise ValueError(
                "MCLMC moves at a constant speed, for which it needs at least 2 unknowns; the "
                "target has 1. `bayes.NUTS` serves it."
            )

    def init(self, problem: Problem, key: PRNGKeyArray) -> MicrocanonicalState:
        place_key, direction_key, key = jr.split(key, 3)
        density = self._density(problem)
        # BlackJAX tunes in the default dtype.
        place = problem.dispersed(place_key).astype(float)
        chain = blackjax().mcmc.mclmc.init(place, density, direction_key)
        chain, found, _ = blackjax().mclmc_find_L_and_step_size(
            blackjax().mcmc.mclmc.build_kernel(),
            num_steps=_STEPS_OF_TUNING * self.num_warmup,
            state=chain,
            rng_key=key,
            logdensity_fn=density,
            desired_energy_var=self.energy_variance,
        )
        return MicrocanonicalState(chain, found.L, found.step_size, found.inverse_mass_matrix)

    def step(
        self, problem: Problem, state: MicrocanonicalState, index: Array, key: PRNGKeyArray
    ) -> tuple[MicrocanonicalState, Record]:
        kernel = blackjax().mcmc.mclmc.build_kernel()
        chain, info = kernel(
            key,
            state.chain,
            self._density(problem),
            state.inverse_mass_matrix,
            state.length,
            state.step_size,
        )
        record = {
            "draw": chain.position,
            "log_density": chain.logdensity,
            "energy_change": info.energy_change,
        }
        return state._replace(chain=chain), record

    def _density(self, problem: Problem) -> Any:
        return lambda place: problem.log_density(place).astype(place.dtype)
