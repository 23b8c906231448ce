"""Markov chains: MCLMC and HMC with gradients of all data, SGLD and SGHMC with minibatches."""

import abc
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jax.random as jr
import jax.tree_util as jtu
import numpy as np
from jaxtyping import Array, Float, PRNGKeyArray

from ..._check_numbers import positive_number, real_number, whole_number
from .._libraries import blackjax, hmc_util
from .._method import Draws, Method, Problem, Record, State, Step, chosen
from ._descent import MAP, check_batch_size, climb

# Number of L-BFGS steps from a draw towards the mode. For 3,760 unknowns, 60 steps of conjugate
# gradients reach parameters that predict like the mode, and 60 steps of L-BFGS reach a higher
# density.
_NUM_CLIMBS = 100

# --- The base class ---


class MarkovChain(Method):
    """Base of methods whose draws are the positions of Markov chains.

    Each step records the position of the chain as `draw`.
    """

    remedy = "Longer chains, or a narrower prior, may help."

    num_samples: int = 1000
    num_warmup: int = 1000
    chains: int = 4
    thin: int = 1

    def __check_init__(self):
        for name in ("num_samples", "num_warmup", "chains", "thin"):
            least = 0 if name == "num_warmup" else 1
            whole_number(getattr(self, name), f"{type(self).__name__}: {name}", least)

    @property
    def num_chains(self) -> int:
        return self.chains

    @property
    def num_steps(self) -> int:
        return self.num_warmup + self.num_samples * self.thin

    @property
    def num_dropped(self) -> int:
        return self.num_warmup

    @property
    def thinning(self) -> int:
        return self.thin

    def finish(self, problem: Problem, states: State, records: Record, key: PRNGKeyArray) -> Draws:
        draws = records["draw"]
        return draws.reshape(-1, draws.shape[-1])

    def sample(self, problem: Problem, found: Any, num: int, key: PRNGKeyArray) -> Draws:
        return chosen(jnp.asarray(found), num, key)

    def num_found(self, found: Array) -> int:
        return found.shape[0]

    def point_estimate(self, problem: Problem, found: Any) -> Float[Array, " d"] | None:
        """Unknowns near the mode that L-BFGS finds from the last draw."""
        return climb(problem, jnp.asarray(found)[-1], _NUM_CLIMBS)


# --- Microcanonical Langevin Monte Carlo ---


# Each of BlackJAX's three tuning phases uses about a tenth of `num_steps`. The three phases
# together use about `num_warmup` steps if `num_steps` is three times `num_warmup`.
_STEPS_OF_TUNING = 3


class MCLMCState(NamedTuple):
    """The state of a chain, and its tuned parameters.

    - `chain`: BlackJAX's state: position, momentum, log density and gradient.
    - `length`: distance over which the momentum decoheres.
    - `step_size`: distance covered by one step.
    - `inverse_mass_matrix`: diagonal of the inverse mass matrix.
    """

    chain: Any
    length: Float[Array, ""]
    step_size: Float[Array, ""]
    inverse_mass_matrix: Float[Array, " d"]


class MCLMC(MarkovChain):
    """Microcanonical Langevin Monte Carlo, for networks with many unknowns.

    A step costs two gradients of all examples. A kept draw needs as much memory as the unknowns. Do
    not use it if draws must be exact: steps are never rejected, so draws have a small bias.

    The step size limits the bias. It is chosen such that the variance of the energy error per
    unknown is `energy_variance` (Robnik, De Luca, Silverstein and Seljak, 2023, "Microcanonical
    Hamiltonian Monte Carlo"; BlackJAX's implementation).

    - `num_samples`: number of draws that each chain keeps.
    - `num_warmup`: number of warm-up steps, which tune the step size, the momentum decoherence
      length and a diagonal mass matrix. They run in one call, before the progress bar moves.
    - `chains`: number of chains.
    - `thin`: keep every n-th draw.
    - `energy_variance`: variance of the energy error, in squared nats per unknown. Smaller values
      mean less bias and smaller steps.

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
                f"MCLMC: num_warmup must be at least 100, got {self.num_warmup}: warm-up tunes "
                "step size, length and mass matrix."
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
                "MCLMC needs at least 2 unknowns, because it moves at a constant speed; the target "
                "has 1. Use `bayes.NUTS`."
            )

    def init(self, problem: Problem, key: PRNGKeyArray) -> MCLMCState:
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
        return MCLMCState(chain, found.L, found.step_size, found.inverse_mass_matrix)

    def step(self, problem: Problem, state: MCLMCState, index: Array, key: PRNGKeyArray) -> Step:
        kernel = blackjax().mcmc.mclmc.build_kernel()
        tuned = state.inverse_mass_matrix, state.length, state.step_size
        chain, info = kernel(key, state.chain, self._density(problem), *tuned)
        record = {
            "draw": chain.position,
            "log_density": chain.logdensity,
            "energy_change": info.energy_change,
        }
        return state._replace(chain=chain), record

    def _density(self, problem: Problem) -> Any:
        return lambda place: problem.log_density(place).astype(place.dtype)


# --- Chains with minibatch gradients ---


Place = Float[Array, " d"]


class SGState(NamedTuple):
    """The state of a chain with minibatch gradients.

    - `noise`: a sample of the gradient noise in the last step; `None` if gradients use all data.
    """

    place: Place
    noise: Place | None


class StochasticGradient(MarkovChain):
    """Base of SGLD and SGHMC, with the fields of `bayes.SGLD`.

    Without a correction, the gradient noise of minibatches would increase the variance of the
    draws. Each minibatch is split in two halves, and each half has a gradient. A step uses the mean
    of the two gradients. Half of their difference has the same covariance as the noise of this
    mean, but is uncorrelated with the noise. Along this difference, a step removes as much variance
    from the momentum as the gradient noise adds.
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

    def point_estimate(self, problem: Problem, found: Any) -> Place | None:
        # There is no estimate if steps use minibatches, because the whole data set may not fit in
        # memory.
        return super().point_estimate(problem, found) if self.batch_size is None else None

    def init(self, problem: Problem, key: PRNGKeyArray) -> SGState:
        place_key, key = jr.split(key)
        descent = MAP(steps=max(1, self.descent_steps), batch_size=self.batch_size)

        def one(index: Array, state: Any) -> Any:
            return descent.step(problem, state, index, jr.fold_in(key, index))[0]

        # Start from shuffled parameters, like the members of an ensemble.
        first = descent.init(problem, place_key)._replace(place=problem.redrawn(place_key))
        place = jax.lax.fori_loop(0, self.descent_steps, one, first).place
        return SGState(place, None if self.batch_size is None else jnp.zeros_like(place))

    def step(self, problem: Problem, state: SGState, index: Array, key: PRNGKeyArray) -> Step:
        shrunk = (1 + index / max(1, self.num_warmup)) ** -self.decay
        rate = self.step_size * shrunk / problem.target.num_data
        state, broadening = self.move(problem, state, rate.astype(state.place.dtype), key)
        record = {"draw": state.place}
        return state, record if self.batch_size is None else record | {"broadening": broadening}

    @abc.abstractmethod
    def move(
        self, problem: Problem, state: SGState, rate: Array, key: PRNGKeyArray
    ) -> tuple[SGState, Float[Array, ""]]:
        """Makes one transition.

        Also returns the factor by which gradient noise increases the variance.

        **Arguments:**

        - `rate`: the step size divided by the number of examples.
        """

    def _gradient(
        self, problem: Problem, place: Place, key: PRNGKeyArray
    ) -> tuple[Place, Place | None]:
        """The gradient, and a sample of its noise."""
        gradient = jax.grad(problem.batch_log_density)
        if self.batch_size is None:
            return gradient(place, None), None
        batch = problem.batch(key, 2 * -(-self.batch_size // 2))
        halves = jtu.tree_map(lambda leaf: leaf.reshape(2, -1, *leaf.shape[1:]), batch)
        first, second = jax.vmap(gradient, in_axes=(None, 0))(place, halves)
        return (first + second) / 2, (first - second) / 2


def _cooled(
    momentum: Place, noise: Place | None, last_noise: Place | None, share: Array
) -> tuple[Place, Array, Array]:
    """Removes `share` times the covariance of the noise from a momentum with covariance 1.

    At most the whole variance 1 can be removed along a direction.

    **Returns:** the momentum; the variance that was removed; and the noise variance that remains.
    Both variances are measured along `last_noise`, the noise of another gradient.
    """
    if noise is None or last_noise is None:
        return momentum, jnp.zeros(()), jnp.zeros(())
    tiny = jnp.finfo(noise.dtype).tiny
    square = noise @ noise
    taken = jnp.minimum(share, 1 / jnp.maximum(square, tiny))
    along = (noise @ last_noise) ** 2 / jnp.maximum(last_noise @ last_noise, tiny)
    scale = taken / (1 + jnp.sqrt(jnp.maximum(1 - taken * square, 0)))
    return momentum - scale * (noise @ momentum) * noise, along * taken, along * (share - taken)


# --- Stochastic gradient Langevin dynamics ---


class SGLD(StochasticGradient):
    """Stochastic gradient Langevin dynamics: gradient descent with noise, for minibatches.

    A step costs one gradient of `batch_size` examples. A kept draw needs as much memory as the
    unknowns. Do not use it if draws must be exact: the draws are biased, and larger steps increase
    the bias.

    A step adds `step_size / N` times the gradient of the log density, where `N` is the number of
    examples. It also adds normal noise of variance `2 * step_size * temperature / N` (Welling and
    Teh, 2011, "Bayesian Learning via Stochastic Gradient Langevin Dynamics"). The gradient noise is
    estimated from the two halves of the minibatch. The variance of the normal noise is reduced by
    the variance of the gradient noise (Ahn, Korattikara and Welling, 2012, "Bayesian Posterior
    Sampling via Stochastic Gradient Fisher Scoring"). For a normal posterior of precision `P`, the
    covariance of the draws is `(P (I - step_size P / (2 N)))^-1`. If gradient noise exceeds the
    normal noise, the draws are too wide, and a warning reports by how much. If the step size is too
    large, chains diverge to infinity. If the step size is too small, chains hardly move.

    - `num_samples`: number of draws that each chain keeps.
    - `num_warmup`: number of steps before the first draw.
    - `chains`: number of chains.
    - `thin`: keep every n-th draw.
    - `step_size`: a learning rate. It need not change with the number of examples.
    - `decay`: step `t` has step size `step_size * (1 + t / num_warmup)**-decay`; 0 for a constant
      step size. All draws have equal weight.
    - `batch_size`: examples per gradient, drawn with replacement; all examples by default. An odd
      number is rounded up.
    - `temperature`: the draws are from the posterior density to the power `1 / temperature`.
    - `descent_steps`: number of Adam steps towards a mode, before the first step of a chain.

    >>> from eqxlike import bayes
    >>> method = bayes.SGLD(step_size=1e-3, batch_size=64)
    """

    def move(
        self, problem: Problem, state: SGState, rate: Array, key: PRNGKeyArray
    ) -> tuple[SGState, Float[Array, ""]]:
        batch_key, key = jr.split(key)
        gradient, noise = self._gradient(problem, state.place, batch_key)
        normal = jr.normal(key, gradient.shape, gradient.dtype)
        share = rate / (2 * self.temperature)
        normal, _, left = _cooled(normal, noise, state.noise, share)
        place = state.place + rate * gradient + jnp.sqrt(2 * rate * self.temperature) * normal
        return SGState(place, noise), 1 + left


# --- Stochastic gradient Hamiltonian Monte Carlo ---


class SGHMC(StochasticGradient):
    """Stochastic gradient Hamiltonian Monte Carlo: SGLD with momentum, so that chains move further.

    A step costs `trajectory_steps` gradients of `batch_size` examples. A kept draw needs as much
    memory as the unknowns. Do not use it if draws must be exact: the draws are biased.

    Normal noise replaces the energy that friction removes (Chen, Fox and Guestrin, 2014,
    "Stochastic Gradient Hamiltonian Monte Carlo"). Each gradient has its own minibatch. A step
    removes the energy of the gradient noise from the momentum, not from the normal noise. In a
    direction where the posterior has precision `p`, the variance is too large by about 2% plus
    `step_size * p / (N friction)`, where `N` is the number of examples. If this quotient is 1, the
    chain diverges to infinity. If gradient noise exceeds the momentum, the draws are wider still,
    and a warning reports by how much.

    - `friction`: fraction of the momentum that is lost at each gradient. In an optimiser, this is 1
      minus the momentum parameter.
    - `trajectory_steps`: gradients per step. Each step starts with a new momentum.

    The other fields are described in `bayes.SGLD`. Here, too, the step size is a learning rate:
    gradients are multiplied by it before they are added to the momentum.

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
        self, problem: Problem, state: SGState, rate: Array, key: PRNGKeyArray
    ) -> tuple[SGState, Float[Array, ""]]:
        # Time is in units in which the mass is 1. Friction and noise of variance `2 friction` give
        # the momentum the variance `1 / (1 - friction / 2)`.
        time, friction = jnp.sqrt(rate), self.friction
        share = rate * (1 - friction / 2) / self.temperature
        spread = jnp.sqrt(2 * friction * self.temperature).astype(time.dtype)

        def one(carry: Any, key: PRNGKeyArray) -> Any:
            place, momentum, last_noise = carry
            batch_key, key = jr.split(key)
            gradient, noise = self._gradient(problem, place, batch_key)
            slowed = (1 - friction) * momentum + spread * jr.normal(key, place.shape, place.dtype)
            slowed, *heat = _cooled(slowed, noise, last_noise, share)
            return (place + time * momentum, slowed + time * gradient, noise), heat

        first_key, key = jr.split(key)
        momentum = jr.normal(first_key, state.place.shape, state.place.dtype)
        first = state.place, momentum * self.temperature**0.5, state.noise
        keys = jr.split(key, self.trajectory_steps)
        (place, _, noise), (taken, left) = jax.lax.scan(one, first, keys)
        damping = 1 - (1 - friction) ** 2 + jnp.mean(taken)
        return SGState(place, noise), 1 + jnp.mean(left) / damping


# --- The warm-up that HMC and NUTS share ---


class HMCState(NamedTuple):
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

    def init(self, problem: Problem, key: PRNGKeyArray) -> HMCState:
        place = problem.dispersed(key)
        matrix = jnp.eye(problem.size) if self.dense_mass else jnp.ones(problem.size)
        return HMCState(
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

    def gathered(self, state: HMCState, index: Array, acceptance: Array) -> tuple[HMCState, Array]:
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

    def closed(self, state: HMCState) -> HMCState:
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

    def step(self, problem: Problem, state: HMCState, index: Array, key: PRNGKeyArray) -> Step:
        length_key, key = jr.split(key)
        num_steps = jr.randint(length_key, (), 1, self.trajectory_steps + 1)
        hmc, adapted = blackjax().mcmc.hmc, (state.step_size, state.inverse_mass_matrix)
        chain = hmc.HMCState(*state[:3])
        chain, info = hmc.build_kernel()(key, chain, problem.log_density, *adapted, num_steps)
        state = state._replace(
            place=chain.position, log_density=chain.logdensity, gradient=chain.logdensity_grad
        )
        if self.num_warmup:

            def learn(state: HMCState) -> HMCState:
                state, is_end = self.gathered(state, index, info.acceptance_rate)
                return jax.lax.cond(is_end, self.closed, lambda state: state, state)

            state = jax.lax.cond(index < self.num_warmup, learn, lambda state: state, state)
        record = {
            "draw": state.place,
            "log_density": state.log_density,
            "acceptance": info.acceptance_rate,
            "is_divergent": info.is_divergent,
            "energy": info.energy,
            "num_gradients": info.num_integration_steps,
        }
        return state, record
