"""The No-U-Turn Sampler, vectorised so that chains do not wait for each other.

A trajectory doubles until it makes a U-turn. A doubling adds a subtree to one end of the
trajectory. The subtree has as many steps as the trajectory. If each trajectory were its own loop,
all chains of a batch would wait for the longest trajectory. Here all chains take one leapfrog step
at a time, even if the chains are at different draws. There are three nested loops. The inner loop
makes leapfrog steps until the subtree of some chain ends. The middle loop merges finished subtrees
into their trajectories, until some trajectory ends. The outer loop stores the draws of finished
trajectories and starts the next trajectories (as in Dance, Glaser, Orbanz and Adams, 2025,
"Efficiently Vectorized MCMC on Modern Accelerators").
"""

import functools
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import jax.random as jr
import jax.tree_util as jtu
import numpy as np
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray, UInt

from ..._check_numbers import whole_number
from ...nn._parameters import threefry
from .._method import Problem, Step
from ._markov_chains import Hamiltonian, HMCState


class NUTS(Hamiltonian):
    """The No-U-Turn Sampler: the reference method, exact up to Monte Carlo error.

    A step costs up to `2**max_doublings - 1` gradients of all examples. A kept draw needs as much
    memory as the unknowns. Do not use it for more than a few thousand unknowns, or for data too
    large for this many gradients.

    The algorithm is by Hoffman and Gelman (2014), "The No-U-Turn Sampler". A draw is chosen from
    its trajectory as in Betancourt (2017), "A Conceptual Introduction to Hamiltonian Monte Carlo".
    Warm-up is the same as in Stan. Chains in one batch do not wait for each other's trajectories.

    - `num_samples`: number of draws that each chain keeps.
    - `num_warmup`: number of warm-up steps, which adapt the step size and the mass matrix.
    - `chains`: number of chains.
    - `thin`: keep every n-th draw.
    - `target_acceptance`: mean acceptance rate that warm-up aims at by adapting the step size. A
      rate closer to 1 means smaller steps.
    - `dense_mass`: whether the mass matrix has correlations. Steps are then slower, but fewer are
      needed.
    - `step_size`: initial step size of the warm-up. With `num_warmup=0`, all steps have this step
      size, in units of the unknowns in linked space, and the mass matrix is the identity. In this
      case, choose a step size for which `diagnostics.acceptance` is near `target_acceptance`.
    - `max_doublings`: a trajectory has at most `2**max_doublings - 1` steps.

    >>> from eqxlike import bayes
    >>> method = bayes.NUTS(num_samples=500, target_acceptance=0.9)
    """

    max_doublings: int = 10

    makes_draws_in_turn: ClassVar[bool] = False

    def __check_init__(self):
        whole_number(self.max_doublings, "NUTS: max_doublings")

    def step(self, problem: Problem, state: HMCState, index: Array, key: PRNGKeyArray) -> Step:
        one = jtu.tree_map(lambda each: each[None], (state, key))
        states, records = _Integrator(self, problem, one[1], index, 1, 1).run(one[0])
        return jtu.tree_map(lambda each: each[0], states), {
            name: each[0, 0] for name, each in records.items()
        }

    def advance(
        self,
        problem: Problem,
        states: HMCState,
        keys: PRNGKeyArray,
        first: Array | np.ndarray,
        count: Array | np.ndarray,
        buffers: dict[str, Array],
    ) -> tuple[HMCState, dict[str, Array]]:
        if type(self).step is not NUTS.step:
            return super().advance(problem, states, keys, first, count, buffers)
        most = buffers["draw"].shape[1]
        return _Integrator(self, problem, keys, first, count, most).run(states)


# --- The integrator, for `C` chains of `d` unknowns: all arrays have a leading axis of chains ---


class _Subtree(NamedTuple):
    """The current subtree of each chain, which extends one end of its trajectory.

    - `place`, `momentum`, `gradient`: state after its last step.
    - `momenta`: sum of the momenta of its steps.
    - `step_size`: negative if the subtree grows to the left; 0 once the chain has made all draws.
    - `log_weight`: log of the total weight of its steps, relative to the start of the trajectory.
    - `acceptance`: sum of the acceptance probabilities of all steps of the trajectory.
    - `size`: number of its steps.
    - `ended`: whether the last step completed or stopped the subtree.
    - `stopped`: whether the last step stopped the subtree, because of a U-turn or a divergence.
    - `diverged`: whether the last step diverged.
    - `random_bits`: two random words. They are stored so that the loops do not compute them twice.
    - `proposal`: position, gradient, log density and energy of one step of the subtree. The step is
      chosen with a probability proportional to its weight.
    - `turning_points`: two vectors for each level of smaller subtrees. Both belong to the first
      step of the current subtree at this level. They are the velocity, and half the momentum minus
      the sum of the momenta up to this step.
    """

    place: Float[Array, "C d"]
    momentum: Float[Array, "C d"]
    gradient: Float[Array, "C d"]
    momenta: Float[Array, "C d"]
    step_size: Float[Array, " C"]
    log_weight: Float[Array, " C"]
    acceptance: Float[Array, " C"]
    size: Int[Array, " C"]
    ended: Bool[Array, " C"]
    stopped: Bool[Array, " C"]
    diverged: Bool[Array, " C"]
    random_bits: UInt[Array, "C 2"]
    proposal: Float[Array, "C 2*d+2"]
    turning_points: Float[Array, "C K 2 d"]


class _Trajectory(NamedTuple):
    """The current trajectory of each chain.

    - `momenta`, `log_weight`, `size`: like the fields of the subtree, for the whole trajectory.
    - `sample`: like the subtree's `proposal`, for the whole trajectory.
    - `energy`: energy at the start of the trajectory.
    - `depth`: number of doublings.
    - `is_right`: whether the next doubling extends the right end.
    - `over`: whether the last doubling ended the trajectory.
    - `ends`: position, momentum and gradient at the left and the right end.
    - `seed`: three random words. Two seed the random numbers of the steps, and one chooses the side
      of the first doubling.
    """

    momenta: Float[Array, "C d"]
    log_weight: Float[Array, " C"]
    energy: Float[Array, " C"]
    size: Int[Array, " C"]
    depth: Int[Array, " C"]
    is_right: Bool[Array, " C"]
    over: Bool[Array, " C"]
    ends: Float[Array, "C 2 3 d"]
    sample: Float[Array, "C 2*d+2"]
    seed: UInt[Array, "C 3"]


class _State(NamedTuple):
    """The state of the integrator.

    - `num`: number of draws that each chain has made.
    - `adapted`: step size, mass matrix and warm-up state. The chain's position is in
      `trajectory.sample`, not here.
    - `scale`: transforms standard normal numbers to momenta.
    - `draws`, `statistics`: the records, with one extra row for chains that are finished.
    """

    subtree: _Subtree
    trajectory: _Trajectory
    num: Int[Array, " C"]
    adapted: HMCState
    scale: Float[Array, "C d"] | Float[Array, "C d d"]
    draws: Float[Array, "C n+1 d"]
    statistics: Float[Array, "C n+1 5"]


# A step diverges if its energy error exceeds this many nats.
_MAX_ENERGY_ERROR = 1000.0


class _Integrator:
    """Makes `count` draws of each chain.

    **Arguments:**

    - `keys`: one key per chain.
    - `first`: the number of the first draw.
    - `most`: number of rows of the records, at least `count`.
    """

    def __init__(
        self, method: NUTS, problem: Problem, keys: PRNGKeyArray, first: Any, count: Any, most: int
    ):
        self.method, self.first, self.count, self.most = method, first, count, most
        self.num_warmup = method.num_warmup
        # The size of a subtree is an int32.
        self.most_doublings = min(method.max_doublings, 30)
        self.num_chains, self.size = len(keys), problem.size
        self.value_and_gradient = jax.vmap(jax.value_and_grad(problem.log_density))
        self.seeds, self.normals = _random_numbers(keys, first + jnp.arange(most), problem)

    def run(self, states: HMCState) -> tuple[HMCState, dict[str, Array]]:
        """The states after the draws, and the records of the draws."""
        state = _repeated(
            self._with_draws, lambda state: jnp.any(state.num < self.count), self._begun(states)
        )
        sample, size = state.trajectory.sample, self.size
        log_density, energy, *others = jnp.moveaxis(state.statistics[:, :-1], -1, 0)
        acceptance, is_divergent, num_gradients = others
        adapted = state.adapted._replace(
            place=sample[:, :size], gradient=sample[:, size:-2], log_density=sample[:, -2]
        )
        return jtu.tree_map(lambda new, old: new.astype(old.dtype), adapted, states), {
            "draw": state.draws[:, :-1],
            "log_density": log_density,
            "acceptance": acceptance,
            "is_divergent": is_divergent > 0,
            "energy": energy,
            "num_gradients": num_gradients.astype(jnp.int32),
        }

    # --- bodies of the three loops, from the outermost ---

    def _with_draws(self, state: _State) -> _State:
        """Runs until trajectories end, stores their draws, and starts the next trajectories."""
        state = _repeated(
            self._with_doublings, lambda state: ~jnp.any(state.trajectory.over), state
        )
        subtree, trajectory, num = state.subtree, state.trajectory, state.num
        sample, over = trajectory.sample, trajectory.over
        acceptance = subtree.acceptance / trajectory.size
        others = jnp.stack([acceptance, subtree.diverged, trajectory.size], axis=1)
        statistics = jnp.concatenate([sample[:, -2:], others], axis=1)
        # A chain whose trajectory continues has no draw yet, and its `num` stays the same. So its
        # next draw overwrites the row that is written here.
        row = jnp.arange(self.num_chains), num
        state = state._replace(
            draws=state.draws.at[row].set(sample[:, : self.size].astype(state.draws.dtype)),
            statistics=state.statistics.at[row].set(statistics),
            num=num + over,
        )
        if self.num_warmup:
            learns = over & (self.first + num < self.num_warmup)
            adapted, scale = jax.lax.cond(
                jnp.any(learns),
                lambda: self._learnt(state, learns, self.first + num, acceptance),
                lambda: (state.adapted, state.scale),
            )
            state = state._replace(adapted=adapted, scale=scale)
        return self._with_trajectories(state)

    def _with_doublings(self, state: _State) -> _State:
        """Runs until subtrees end, and merges them into their trajectories."""
        state = _repeated(
            self._with_step, lambda state: ~jnp.any(state.subtree.ended), self._with_subtrees(state)
        )
        subtree, old = state.subtree, state.trajectory
        # Biased progressive sampling prefers the new half, so that draws are further apart.
        likely = jnp.exp(subtree.log_weight - old.log_weight)
        is_taken = ~subtree.stopped & (_uniform(subtree, likely.dtype) < likely)
        both = jnp.logaddexp(subtree.log_weight, old.log_weight)
        end = jnp.stack([subtree.place, subtree.momentum, subtree.gradient], axis=1)[:, None]
        is_side = jnp.stack([~old.is_right, old.is_right], axis=1)
        trajectory = _where(
            subtree.ended,
            old,
            momenta=old.momenta + subtree.momenta,
            log_weight=jnp.where(subtree.stopped, old.log_weight, both),
            size=old.size + subtree.size,
            depth=old.depth + 1,
            is_right=subtree.random_bits[:, 1] & 1 == 1,
            ends=_selected(is_side, end, old.ends),
            sample=_selected(is_taken, subtree.proposal, old.sample),
        )
        momenta = trajectory.ends[:, :, 1]
        inside = (trajectory.momenta - 0.5 * jnp.sum(momenta, axis=1))[:, None]
        is_turn = jnp.any(_dots(self._velocity(state, momenta), inside) <= 0, axis=1)
        is_last = subtree.stopped | is_turn | (trajectory.depth == self.most_doublings)
        trajectory = trajectory._replace(over=subtree.ended & is_last)
        return state._replace(trajectory=trajectory)

    def _with_step(self, state: _State) -> _State:
        """Makes one leapfrog step of all chains."""
        old, trajectory = state.subtree, state.trajectory
        step_size = old.step_size[:, None]
        momentum = old.momentum + 0.5 * step_size * old.gradient
        place = old.place + step_size * self._velocity(state, momentum)
        log_density, gradient = self.value_and_gradient(place)
        momentum = momentum + 0.5 * step_size * gradient
        velocity = self._velocity(state, momentum)

        energy = 0.5 * _dots(momentum, velocity) - log_density
        gain = trajectory.energy - energy
        gain = jnp.where(jnp.isnan(gain), -jnp.inf, jnp.minimum(gain, jnp.finfo(gain.dtype).max))
        log_weight = jnp.logaddexp(old.log_weight, gain)
        is_taken = _uniform(old, gain.dtype) < jnp.exp(gain - log_weight)
        parts = place, gradient, log_density[:, None], energy[:, None]
        here = jnp.concatenate([each.astype(old.proposal.dtype) for each in parts], axis=1)
        momenta = old.momenta + momentum
        is_turn, turning_points = self._turn(old, momentum, velocity, momenta)

        is_active = state.num < self.count
        diverged = gain < -_MAX_ENERGY_ERROR
        stopped = (is_turn | diverged) & is_active
        size = old.size + 1
        subtree = _Subtree(
            place=place,
            momentum=momentum,
            gradient=gradient,
            momenta=momenta,
            step_size=old.step_size,
            log_weight=log_weight,
            acceptance=old.acceptance + jnp.exp(jnp.minimum(gain, 0)),
            size=size,
            ended=stopped | (size == 1 << trajectory.depth) & is_active,
            stopped=stopped,
            diverged=diverged,
            random_bits=_random_bits(trajectory.seed, size, trajectory.depth),
            proposal=_selected(is_taken, here, old.proposal),
            turning_points=turning_points,
        )
        return state._replace(subtree=subtree)

    # --- helpers of the loops ---

    def _turn(
        self, subtree: _Subtree, momentum: Array, velocity: Array, momenta: Array
    ) -> tuple[Bool[Array, " C"], Float[Array, "C K 2 d"]]:
        """Tests the subtrees that end with this step for U-turns.

        **Returns:** True for the chains in which one of these subtrees makes a U-turn, and the new
        turning points.

        If the step number `n` is even, the step begins subtrees. If `n` is odd, the step ends one
        subtree for each trailing 1 of the binary number `n`. The index of a subtree's turning
        points is the number of 1s to the left of the subtree's trailing 1.
        """
        number, levels = subtree.size, jnp.arange(subtree.turning_points.shape[1])
        top = jax.lax.population_count(number >> 1)[:, None]
        num_ended = jax.lax.population_count((~number & (number + 1)) - 1)[:, None]
        half = 0.5 * momentum
        turning_point = jnp.stack([velocity, half - momenta], axis=1)[:, None]
        is_begun = (number & 1 == 0)[:, None] & (levels == top)
        turning_points = _selected(is_begun, turning_point, subtree.turning_points)

        inside = (momenta - half)[:, None] + subtree.turning_points[:, :, 1]
        is_turn = _dots(subtree.turning_points[:, :, 0], inside) <= 0
        is_turn |= _dots(velocity[:, None], inside) <= 0
        is_ended = (levels > top - num_ended) & (levels <= top)
        return jnp.any(is_turn & is_ended, axis=1), turning_points

    def _with_subtrees(self, state: _State) -> _State:
        """Starts the next subtree of the chains whose subtree ended."""
        trajectory, step_size = state.trajectory, state.adapted.step_size
        end = _selected(trajectory.is_right, trajectory.ends[:, 1], trajectory.ends[:, 0])
        step_size = jnp.where(trajectory.is_right, step_size, -step_size)
        none = jnp.zeros_like(trajectory.depth)
        subtree = _where(
            state.subtree.ended,
            state.subtree,
            place=end[:, 0],
            momentum=end[:, 1],
            gradient=end[:, 2],
            momenta=0,
            step_size=jnp.where(state.num < self.count, step_size, 0),
            log_weight=-jnp.inf,
            size=0,
            random_bits=_random_bits(trajectory.seed, none, trajectory.depth),
        )
        return state._replace(subtree=subtree._replace(ended=jnp.zeros_like(subtree.ended)))

    def _with_trajectories(self, state: _State) -> _State:
        """Starts the next trajectory of the chains whose trajectory is over."""
        row = jnp.arange(self.num_chains), jnp.minimum(state.num, self.most - 1)
        seed, normal = self.seeds[row], self.normals[row]
        if self.method.dense_mass:
            solve = functools.partial(jax.scipy.linalg.solve_triangular, trans=1, lower=True)
            momentum = jax.vmap(solve)(state.scale, normal)
        else:
            momentum = state.scale * normal
        old = state.trajectory
        place, gradient = old.sample[:, : self.size], old.sample[:, self.size : -2]
        energy = 0.5 * _dots(momentum, self._velocity(state, momentum)) - old.sample[:, -2]
        parts = place, momentum.astype(place.dtype), gradient
        trajectory = _where(
            old.over,
            old,
            momenta=momentum,
            log_weight=0,
            energy=energy,
            size=0,
            depth=0,
            is_right=seed[:, 2] & 1 == 1,
            ends=jnp.stack(parts, axis=1)[:, None],
            sample=jnp.concatenate([old.sample[:, :-1], energy[:, None]], axis=1),
            seed=seed,
        )
        trajectory = trajectory._replace(over=jnp.zeros_like(old.over))
        subtree = _where(old.over, state.subtree, acceptance=0)
        return state._replace(trajectory=trajectory, subtree=subtree)

    def _learnt(
        self, state: _State, learns: Array, index: Array, acceptance: Array
    ) -> tuple[HMCState, Array]:
        """Updates the warm-up, after draw number `index`, of the chains for which `learns` is true.

        **Returns:** the warm-up state, and the field `scale` of `_State`.
        """
        old, place = state.adapted, state.trajectory.sample[:, : self.size]
        here = old._replace(place=place.astype(self.normals.dtype))
        gathered, is_end = jax.vmap(self.method.gathered)(here, index, acceptance)
        gathered = _selected(learns, gathered._replace(place=old.place), old)
        is_end &= learns

        def closed() -> tuple[HMCState, Array]:
            closed = _selected(is_end, jax.vmap(self.method.closed)(gathered), gathered)
            return closed, self._scale(closed)

        return jax.lax.cond(jnp.any(is_end), closed, lambda: (gathered, state.scale))

    def _scale(self, adapted: HMCState) -> Array:
        matrix = adapted.inverse_mass_matrix
        is_dense = self.method.dense_mass
        scale = jnp.linalg.cholesky(matrix) if is_dense else 1 / jnp.sqrt(matrix)
        return scale.astype(self.normals.dtype)

    def _velocity(self, state: _State, momenta: Array) -> Array:
        matrix = state.adapted.inverse_mass_matrix.astype(momenta.dtype)
        if self.method.dense_mass:
            return jnp.einsum("cij,c...j->c...i", matrix, momenta)
        return jnp.expand_dims(matrix, range(1, momenta.ndim - 1)) * momenta

    def _begun(self, states: HMCState) -> _State:
        """The state of the integrator before the first step."""
        (num_chains, size), dtype = states.place.shape, states.place.dtype
        # Weights and random numbers need at least float32.
        wide = jnp.result_type(dtype, states.log_density.dtype, jnp.float32)
        number, whole = jnp.zeros(num_chains, wide), jnp.zeros(num_chains, jnp.int32)
        vector, yes = jnp.zeros((num_chains, size), dtype), jnp.ones(num_chains, bool)
        parts = states.place, states.gradient, states.log_density[:, None], number[:, None]
        sample = jnp.concatenate([each.astype(wide) for each in parts], axis=1)
        turning_points = jnp.zeros((num_chains, max(1, self.most_doublings - 1), 2, size), dtype)
        ends, seed = jnp.zeros((num_chains, 2, 3, size), dtype), self.seeds[:, 0]
        subtree = _Subtree(
            *(vector, vector, vector, vector),
            *(vector[:, 0], number, number),
            whole,
            *(yes, yes, yes),
            seed[:, :2],
            sample,
            turning_points,
        )
        trajectory = _Trajectory(vector, number, number, whole, whole, yes, yes, ends, sample, seed)
        rows = num_chains, self.most + 1
        state = _State(
            subtree,
            trajectory,
            num=whole,
            adapted=states,
            scale=self._scale(states),
            draws=jnp.zeros((*rows, size), dtype),
            statistics=jnp.zeros((*rows, 5), wide),
        )
        return self._with_trajectories(state)


def _dots(a: Float[Array, "... d"], b: Float[Array, "... d"]) -> Float[Array, " ..."]:
    return jnp.sum(a * b, axis=-1)


def _where(where: Array, old: Any, **new: Any) -> Any:
    """Replaces fields of a named tuple for the chains in which `where` is true."""
    return old._replace(**_selected(where, new, {name: getattr(old, name) for name in new}))


def _selected(where: Array, new: Any, old: Any) -> Any:
    """Selects leaves of `new` where the mask `where` is true, and otherwise leaves of `old`.

    The axes of the mask are the leading axes of each leaf. The result has the dtypes of `old`.
    """

    def of(new: Any, old: Array) -> Array:
        each = jnp.expand_dims(where, range(where.ndim, old.ndim))
        return jnp.where(each, new, old).astype(old.dtype)

    return jtu.tree_map(of, new, old)


def _repeated(body: Callable, goes_on: Callable, state: _State) -> _State:
    """`jax.lax.while_loop` that packs fields of the same shape and dtype into one array.

    If a loop has many operations, XLA runs the loop in several threads on CPUs. For small
    operations, the threads cost more time than they save. Packing reduces the number of operations.
    """
    first, treedef = jtu.tree_flatten((state.subtree, state.trajectory))
    kinds: dict[Any, list[int]] = {}
    for index, leaf in enumerate(first):
        kinds.setdefault((leaf.shape, leaf.dtype), []).append(index)

    def packed(state: _State) -> Any:
        leaves = jtu.tree_leaves((state.subtree, state.trajectory))
        arrays = [jnp.stack([leaves[i] for i in kind], axis=1) for kind in kinds.values()]
        return arrays, state._replace(subtree=None, trajectory=None)

    def unpacked(carry: Any) -> _State:
        leaves = dict[int, Array]()
        for array, kind in zip(carry[0], kinds.values(), strict=True):
            leaves |= {index: array[:, place] for place, index in enumerate(kind)}
        subtree, trajectory = jtu.tree_unflatten(treedef, [leaves[i] for i in sorted(leaves)])
        return carry[1]._replace(subtree=subtree, trajectory=trajectory)

    loop = jax.lax.while_loop(
        lambda carry: goes_on(unpacked(carry)),
        lambda carry: packed(body(unpacked(carry))),
        packed(state),
    )
    return unpacked(loop)


# --- Counter-based random numbers, which depend only on the key and the number of a draw ---


def _random_numbers(
    keys: PRNGKeyArray, numbers: Int[Array, " n"], problem: Problem
) -> tuple[UInt[Array, "C n 3"], Float[Array, "C n d"]]:
    """Seeds and standard normal samples for the draws with the indices `numbers`.

    `jax.random` would need several loops, which LLVM unrolls and compiles slowly.
    """
    words = jax.vmap(lambda key: jr.bits(key, (2,), jnp.uint32))(keys)[:, :, None]
    counts = numbers.astype(jnp.uint32)
    first, second = threefry(words[:, 0], words[:, 1], counts, jnp.zeros_like(counts))
    third, _ = threefry(words[:, 0], words[:, 1], counts, jnp.ones_like(counts))
    places, most = jnp.arange(problem.size, dtype=jnp.uint32), np.uint32(2**32 - 1)
    high, low = threefry(first[..., None], second[..., None], places, jnp.full_like(places, most))
    # Midpoints of 2**23 or 2**52 subintervals of (0, 1). Floats represent these midpoints exactly.
    dtype = jnp.promote_types(problem.dtype, jnp.float32)
    if dtype == jnp.float64:
        parts = high.astype(dtype) * 2.0**20 + (low >> 12).astype(dtype)
        uniform = (parts + 0.5) * 2.0**-52
    else:
        uniform = ((high >> 9).astype(dtype) + 0.5) * 2.0**-23
    normals = np.sqrt(2) * jax.lax.erf_inv(2 * uniform - 1)
    return jnp.stack([first, second, third], axis=-1), normals.astype(problem.dtype)


def _random_bits(
    seed: UInt[Array, "C 3"], size: Int[Array, " C"], depth: Int[Array, " C"]
) -> UInt[Array, "C 2"]:
    counts = size.astype(np.uint32), depth.astype(np.uint32)
    return jnp.stack(threefry(seed[:, 0], seed[:, 1], *counts), axis=1)


def _uniform(subtree: _Subtree, dtype: Any) -> Float[Array, " C"]:
    """Uniform random numbers in [0, 1)."""
    return (subtree.random_bits[:, 0] >> 8).astype(dtype) * 2.0**-24
