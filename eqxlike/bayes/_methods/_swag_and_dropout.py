"""Posteriors from a single training run: SWAG and Monte Carlo dropout."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jax.random as jr
import jax.tree_util as jtu
import optax
from jaxtyping import Array, Float, PRNGKeyArray

from ... import filter_eval_shape
from ..._check_numbers import positive_number, whole_number
from ..._compat import Tracer
from ...nn import Dropout, inference_mode
from ...nn._inputs import takes_key
from .._inference._method import Draws, Problem, Record, Step
from .._posterior import Unknowns, nodes_of, num_examples, struct_of_example
from ._descent import Descent, Optimised, descend


class Moments(NamedTuple):
    """Running moments of `n` positions, and the deviations of the last `k`.

    - `count`: the number of positions, `n`.
    - `mean`: mean of the positions.
    - `squares`: sum of squared deviations from the mean.
    - `deviations`: each of the last `k` positions minus the mean up to that position.
    """

    count: Array
    mean: Float[Array, " d"]
    squares: Float[Array, " d"]
    deviations: Float[Array, "k d"]


class SWAGState(NamedTuple):
    """Unknowns, the states of the optimisers of both phases, and the collected moments."""

    place: Float[Array, " d"]
    training: Any
    collecting: Any
    moments: Moments


class SWAG(Descent):
    """SWAG, stochastic weight averaging Gaussian, for networks too large for other methods.

    It costs `steps + collect_steps` minibatch gradients, and memory for `rank` more copies of the
    unknowns. Do not use it with all data in each step: the distribution then has almost no width.

    The training phase is the same as in `bayes.MAP`. A collection phase then continues with a
    constant learning rate. The mean, the variance of each unknown and the last deviations define a
    normal distribution. Half of its covariance is diagonal, and half has low rank (Maddox et al.,
    2019, "A Simple Baseline for Bayesian Uncertainty in Deep Learning"). The width of the
    distribution depends on `collect_learning_rate` and `batch_size` as much as on the posterior.

    - `steps`: number of optimiser steps of the training phase.
    - `learning_rate`: initial learning rate of Adam in the training phase, with cosine decay to
      zero.
    - `optimiser`: an Optax optimiser to use instead of Adam in the training phase.
    - `batch_size`: examples per step, drawn with replacement; `None` for all examples.
    - `collect_steps`: number of steps of the collection phase.
    - `collect_every`: the number n; the unknowns are collected at every n-th step.
    - `collect_learning_rate`: learning rate of Adam in the collection phase.
    - `collect_optimiser`: an Optax optimiser to use instead of Adam in the collection phase, such
      as `optax.sgd(0.01)`.
    - `rank`: number of deviations to keep.

    >>> from eqxlike import bayes
    >>> method = bayes.SWAG(batch_size=16, rank=10)
    """

    remedy = "A smaller collect_learning_rate, or a larger batch_size, may help."

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
                f"{self.collect_steps} and {self.collect_every}: a covariance needs two samples."
            )

    @property
    def num_steps(self) -> int:
        return self.steps + self.collect_steps

    def init(self, problem: Problem, key: PRNGKeyArray) -> SWAGState:
        place, training = super().init(problem, key)
        num_kept = min(self.rank, self.collect_steps // self.collect_every)
        zeros = jnp.zeros_like(place)
        deviations = jnp.zeros((num_kept, *place.shape), place.dtype)
        moments = Moments(jnp.zeros((), jnp.int32), zeros, zeros, deviations)
        return SWAGState(place, training, self._collector().init(place), moments)

    def step(self, problem: Problem, state: SWAGState, index: Array, key: PRNGKeyArray) -> Step:
        loss = self.loss(problem, key)

        def train() -> tuple[SWAGState, Array]:
            before = Optimised(state.place, state.training)
            (place, training), value = descend(self._optimiser(), loss, before)
            return state._replace(place=place, training=training), value

        def collect() -> tuple[SWAGState, Array]:
            before = Optimised(state.place, state.collecting)
            (place, collecting), value = descend(self._collector(), loss, before)
            is_kept = (index - self.steps + 1) % self.collect_every == 0
            moments = jax.lax.cond(
                is_kept, lambda: _welford_update(state.moments, place), lambda: state.moments
            )
            return state._replace(place=place, collecting=collecting, moments=moments), value

        state, value = jax.lax.cond(index < self.steps, train, collect)
        return state, {"loss": value}

    def finish(
        self, problem: Problem, states: SWAGState, records: Record, key: PRNGKeyArray
    ) -> Moments:
        return jtu.tree_map(lambda each: each[0], states.moments)

    def num_found(self, found: Moments) -> int | None:
        # There are no draws from one collected position, because it has no covariance. A traced
        # count is not checked.
        return 0 if not isinstance(found.count, Tracer) and int(found.count) < 2 else None

    def point_estimate(self, problem: Problem, found: Moments) -> Float[Array, " d"]:
        return found.mean

    def sample(self, problem: Problem, found: Moments, num: int, key: PRNGKeyArray) -> Draws:
        diagonal_key, key = jr.split(key)
        rank, size = found.deviations.shape
        spread = jnp.sqrt(found.squares / found.count / 2)
        alone = spread * jr.normal(diagonal_key, (num, size), spread.dtype)
        together = jr.normal(key, (num, rank), spread.dtype) @ found.deviations
        return found.mean + alone + together / math.sqrt(2 * (rank - 1))

    def _collector(self) -> optax.GradientTransformationExtraArgs:
        default = optax.adam(self.collect_learning_rate)
        return optax.with_extra_args_support(self.collect_optimiser or default)


def _welford_update(moments: Moments, place: Float[Array, " d"]) -> Moments:
    """Moments with one more position: Welford's update, which is accurate for large means."""
    count = moments.count + 1
    before = place - moments.mean
    mean = moments.mean + before / count
    after = place - mean
    deviations = jnp.concatenate([moments.deviations[1:], after[None]])
    return Moments(count, mean, moments.squares + before * after, deviations)


# --- Monte Carlo dropout ---


class MCDropout(Descent):
    """Monte Carlo dropout: dropout stays active in predictions, for models that have dropout.

    It costs one training run, with more steps than a run without dropout. Do not use it if the data
    should determine the width of the posterior. The dropout rate `p` determines this width. Compare
    several rates on held-out examples.

    The disagreement of networks with different masks is the epistemic uncertainty (Gal and
    Ghahramani, 2016, "Dropout as a Bayesian Approximation: Representing Model Uncertainty in Deep
    Learning"). The model must contain `nn.Dropout`, and is called as `model(x, key=key)`. In
    training, each example has its own masks. A draw is one network, with the same masks for all
    inputs. A draw with `noise=None` is the network without dropout.

    The fields are described in `bayes.MAP`.

    >>> import jax
    >>> from eqxlike import bayes, nn
    >>> key1, key2 = jax.random.split(jax.random.key(0))
    >>> layers = [
    ...     nn.Linear(1, 50, key=key1),
    ...     nn.Lambda(jax.nn.relu),
    ...     nn.Dropout(0.1),
    ...     nn.Linear(50, "scalar", key=key2),
    ... ]
    >>> model, method = nn.Sequential(layers), bayes.MCDropout(steps=3000)
    """

    remedy = "A lower dropout rate, or more steps, may help."

    def check(self, problem: Problem) -> None:
        super().check(problem)
        network = problem.target.network
        rates = [layer.p for layer in nodes_of(Dropout, network)]
        if not any(not isinstance(p, int | float) or p > 0 for p in rates):
            raise ValueError(
                f"MCDropout: {type(network).__name__} has no dropout. Add `nn.Dropout(p=0.1)`, for "
                "example before its last layer."
            )
        if not takes_key(network):
            raise ValueError(
                f"MCDropout calls the model as `model(x, key=key)`, but {type(network).__name__} "
                "takes no `key`. Write `def __call__(self, x, *, key=None)`, and pass the key to "
                "`nn.Dropout`."
            )
        x = struct_of_example(problem.target.data[0])
        try:
            filter_eval_shape(
                lambda network, x: network(x, key=jr.key(0)), inference_mode(network, False), x
            )
        except RuntimeError as error:
            raise ValueError(
                f"MCDropout: the `key` of {type(network).__name__} does not reach its dropout: "
                f"{error}"
            ) from error

    def loss(self, problem: Problem, key: PRNGKeyArray) -> Callable[[Array], Array]:
        target = problem.target
        batch_key, mask_key = jr.split(key)
        x, y = problem.batch(batch_key, self.batch_size) or target.data
        keys = jr.split(mask_key, num_examples(y, "MCDropout"))

        def loss(place: Array) -> Array:
            unknowns, log_det = target.constrain(problem.unflatten(place))
            network = inference_mode(target.model(unknowns), False)

            def of_one(x: Any, y: Any, key: PRNGKeyArray) -> Array:
                return target.likelihood.log_prob(network(x, key=key), unknowns.likelihood, y)

            log_prior = target.log_prior(unknowns) + log_det
            return -jnp.mean(jax.vmap(of_one)(x, y, keys)) - log_prior / target.num_data

        return problem.differentiable(loss)

    def point_estimate(self, problem: Problem, found: Float[Array, "1 d"]) -> Float[Array, " d"]:
        return found[0]

    def noise(self, num: int, key: PRNGKeyArray) -> Array:
        return jr.bits(key, (num, 2), jnp.uint32)

    def network(self, problem: Problem, unknowns: Unknowns) -> Any:
        network = problem.target.model(unknowns)
        if unknowns.noise is None:
            return network
        # The implementation of the key is fixed, so that a draw has the same masks if JAX's default
        # implementation changes.
        key = jr.wrap_key_data(unknowns.noise, impl="threefry2x32")
        network = inference_mode(network, False)
        return lambda x: network(x, key=key)
