"""A normal distribution around the places that stochastic gradient descent visits."""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jax.random as jr
import jax.tree_util as jtu
import optax
from jaxtyping import Array, Float, PRNGKeyArray

from ..._numbers import positive_number, whole_number
from .._inference import Problem, Record
from ._map import MAP, Optimised, descend


class Moments(NamedTuple):
    """What is kept of `n` places, of which the last `k` are the columns of a matrix.

    - `count`: `n`.
    - `mean`: their mean.
    - `squares`: the sum of the squares of their distances from it.
    - `deviations`: each of the last ones less the mean of those until then.
    """

    count: Array
    mean: Float[Array, " d"]
    squares: Float[Array, " d"]
    deviations: Float[Array, "k d"]


class Wandering(NamedTuple):
    """A place, what the optimisers of the two phases keep, and the moments of places before."""

    place: Float[Array, " d"]
    training: Any
    collecting: Any
    moments: Moments


class SWAG(MAP):
    """Stochastic weight averaging, Gaussian: the mean and covariance of where training wanders.

    After the steps of `bayes.MAP` come more at a learning rate that does not fall, in which the
    noise of minibatches keeps the parameters moving about the optimum. Their mean, the variance of
    each, and their last deviations are a normal distribution, half of whose covariance is diagonal
    and half of low rank (Maddox et al., 2019, "A Simple Baseline for Bayesian Uncertainty in Deep
    Learning"). It serves networks that are too large for anything but training. How wide it is
    comes from `collect_learning_rate` and `batch_size` as much as from the posterior; with all
    data in each step it has hardly any width.

    - `steps`: of the optimiser before anything is collected.
    - `learning_rate`: of Adam in those, falling to zero along a cosine.
    - `optimiser`: one of Optax in its place.
    - `batch_size`: examples in a step, drawn with replacement; `None` for all of them.
    - `collect_steps`: the steps after those.
    - `collect_every`: of how many of them the place is collected.
    - `collect_learning_rate`: of Adam in them.
    - `collect_optimiser`: one of Optax in its place, such as `optax.sgd(0.01)`.
    - `rank`: how many deviations are kept.

    >>> from eqxlike import bayes
    >>> method = bayes.SWAG(batch_size=16, rank=10)
    """

    batch_size: int | None = 32
    collect_steps: int = 2000
    collect_every: int = 20
    collect_learning_rate: float = 0.01
    collect_optimiser: optax.GradientTransformation | None = None
    rank: int = 20

    def __check_init__(self):
        whole_number(self.collect_every, "SWAG: collect_every")
        whole_number(self.collect_steps, "SWAG: collect_steps")
        whole_number(self.rank, "SWAG: rank", least=2)
        positive_number(self.collect_learning_rate, "SWAG: collect_learning_rate")
        if self.collect_steps < 2 * self.collect_every:
            raise ValueError(
                f"SWAG: collect_steps must be at least twice collect_every, got "
                f"{self.collect_steps} and {self.collect_every}: one place has no covariance."
            )

    @property
    def num_steps(self) -> int:
        return self.steps + self.collect_steps

    def init(self, problem: Problem, key: PRNGKeyArray) -> Wandering:
        place, training = super().init(problem, key)
        num_kept = min(self.rank, self.collect_steps // self.collect_every)
        zeros = jnp.zeros_like(place)
        deviations = jnp.zeros((num_kept, *place.shape), place.dtype)
        moments = Moments(jnp.zeros((), jnp.int32), zeros, zeros, deviations)
        return Wandering(place, training, self._collector().init(place), moments)

    def step(
        self, problem: Problem, state: Wandering, index: Array, key: PRNGKeyArray
    ) -> tuple[Wandering, Record]:
        loss = self.loss(problem, key)

        def train() -> tuple[Wandering, Array]:
            before = Optimised(state.place, state.training)
            (place, training), value = descend(self._optimiser(), loss, before)
            return state._replace(place=place, training=training), value

        def collect() -> tuple[Wandering, Array]:
            before = Optimised(state.place, state.collecting)
            (place, collecting), value = descend(self._collector(), loss, before)
            is_kept = (index - self.steps + 1) % self.collect_every == 0
            moments = jax.lax.cond(
                is_kept, lambda: _with_place(state.moments, place), lambda: state.moments
            )
            return state._replace(place=place, collecting=collecting, moments=moments), value

        state, value = jax.lax.cond(index < self.steps, train, collect)
        return state, {"loss": value}

    def finish(
        self, problem: Problem, states: Wandering, records: Record, key: PRNGKeyArray
    ) -> Moments:
        return jtu.tree_map(lambda each: each[0], states.moments)

    def sample(
        self, problem: Problem, found: Moments, num: int, key: PRNGKeyArray
    ) -> Float[Array, "S d"]:
        diagonal_key, key = jr.split(key)
        rank, size = found.deviations.shape
        spread = jnp.sqrt(found.squares / found.count / 2)
        alone = spread * jr.normal(diagonal_key, (num, size), spread.dtype)
        together = jr.normal(key, (num, rank), spread.dtype) @ found.deviations
        return found.mean + alone + together / math.sqrt(2 * (rank - 1))

    def num_found(self, found: Any) -> None:
        """Draws are made without end."""

    def diagnosed(self, problem: Problem, found: Any) -> dict[str, Any]:
        """Nothing: the places that are averaged are not meant to be modes."""
        return {}

    def _collector(self) -> optax.GradientTransformationExtraArgs:
        optimiser = self.collect_optimiser
        if optimiser is None:
            optimiser = optax.adam(self.collect_learning_rate)
        return optax.with_extra_args_support(optimiser)


def _with_place(moments: Moments, place: Float[Array, " d"]) -> Moments:
    """Moments with one more place (Welford's update, which loses no digits to large means)."""
    count = moments.count + 1
    before = place - moments.mean
    mean = moments.mean + before / count
    after = place - mean
    deviations = jnp.concatenate([moments.deviations[1:], after[None]])
    return Moments(count, mean, moments.squares + before * after, deviations)
