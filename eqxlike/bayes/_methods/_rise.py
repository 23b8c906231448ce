"""How far below a mode an optimiser ended."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from ..._transforms import filter_jit
from .._inference import Problem
from .._library_rules import as_libraries_compute

_NUM_CLIMBS = 10
# So many halvings of a length leave nothing of it in float32.
_MOST_TRIALS = 30


class _Climb(NamedTuple):
    """Where the method of conjugate gradients stands, and by how much it has risen."""

    place: Float[Array, " d"]
    direction: Float[Array, " d"]
    gradient: Float[Array, " d"]
    length: Float[Array, ""]
    risen: Float[Array, ""]


class _Search(NamedTuple):
    """The best of the lengths that were tried along a direction, and the next."""

    count: Array
    best: Float[Array, ""]
    best_length: Float[Array, ""]
    next_length: Float[Array, ""]
    factor: Float[Array, ""]
    goes_on: Array


@as_libraries_compute()
@filter_jit
def rise(problem: Problem, places: Float[Array, "c d"]) -> Float[Array, " c"]:
    """By how many nats ten steps of conjugate gradients raise the log density, from each place.

    They are counted for each unknown, or for each example where those are fewer: of a normal
    posterior a draw lies half a nat for each unknown below the mode. There is at least as much
    between the place and the mode: nothing where an optimiser came to it, and, since no learning
    rate keeps these steps short, much where one stopped before it.
    """
    num = min(problem.size, problem.target.num_data)
    return jax.lax.map(lambda place: _climbed(problem, place).risen / num, places)


def _climbed(problem: Problem, place: Float[Array, " d"]) -> _Climb:
    """By the rule of Polak and Ribiere (Nocedal and Wright, 2006, "Numerical Optimization")."""

    def climb(_: int, state: _Climb) -> _Climb:
        value, gradient = jax.value_and_grad(problem.log_density)(state.place)
        size = jnp.vdot(state.gradient, state.gradient)
        kept = jnp.vdot(gradient, gradient - state.gradient) / jnp.where(size > 0, size, 1)
        direction = gradient + jnp.maximum(kept, 0) * state.direction
        direction = jnp.where(jnp.vdot(direction, gradient) > 0, direction, gradient)
        size = jnp.linalg.norm(direction)
        first = jnp.where(state.length > 0, state.length, 1 / jnp.where(size > 0, size, 1))
        best, length = _searched(problem, state.place, direction, value, first)
        place = state.place + length * direction
        return _Climb(place, direction, gradient, length, state.risen + best - value)

    zeros, zero = jnp.zeros_like(place), jnp.zeros((), place.dtype)
    return jax.lax.fori_loop(0, _NUM_CLIMBS, climb, _Climb(place, zeros, zeros, zero, zero))


def _searched(
    problem: Problem, place: Array, direction: Array, value: Array, first: Array
) -> tuple[Array, Array]:
    """The greatest log density, and its length, of one doubled or halved while that helps."""

    def attempt(state: _Search) -> _Search:
        count, best, best_length, length, factor, _ = state
        found = problem.log_density(place + length * direction).astype(best.dtype)
        is_better = found > best
        factor = jnp.where((count == 0) & is_better, 2.0, factor).astype(factor.dtype)
        return _Search(
            count + 1,
            jnp.where(is_better, found, best),
            jnp.where(is_better, length, best_length),
            factor * length,
            factor,
            (count < _MOST_TRIALS) & (is_better | (best_length == 0)),
        )

    half = jnp.asarray(0.5, first.dtype)
    begin = _Search(
        jnp.zeros((), jnp.int32), value, jnp.zeros_like(first), first, half, jnp.asarray(True)
    )
    found = jax.lax.while_loop(lambda state: state.goes_on, attempt, begin)
    return found.best, found.best_length
