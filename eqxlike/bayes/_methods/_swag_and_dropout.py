"""Posteriors that one training makes: SWAG, and dropout that stays on in predictions."""

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
from ...nn import Dropout, inference_mode
from ...nn._inputs import takes_key
from .._inference._method import Draws, Problem, Record, Step
from .._posterior import Unknowns, nodes_of, num_examples, struct_of_example
from ._descent import Descent, Optimised, descend


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


class SWAGState(NamedTuple):
    """A place, what the optimisers of the two phases keep, and the moments of places before."""

    place: Float[Array, " d"]
    training: Any
    collecting: Any
    moments: Moments


class SWAG(Descent):
    """Stochastic weight averaging, Gaussian, for networks that are too large for other methods.

    It costs `steps + collect_steps` gradients of minibatches, and the memory of `rank` more copies
    of the unknowns. Do not use it with all data in each step, where it has hardly any width.

    After the steps of `bayes.MAP` come more at a learning rate that does not fall. Their mean, the
    variance of each unknown, and the last deviations are a normal distribution, half of whose
    covariance is diagonal and half of low rank (Maddox et al., 2019, "A Simple Baseline for
    Bayesian Uncertainty in Deep Learning"). `collect_learning_rate` and `batch_size` decide its
    width as much as the posterior.

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
        # A single point has no covariance.
        return None if found.count > 1 else 0

    def point_estimate(self, problem: Problem, found: Moments) -> Float[Array, " d"]:
        return found.mean

    @property
    def remedy(self) -> str:
        return "A smaller collect_learning_rate, or a larger batch_size, may help."

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
    """Moments with one more place (Welford's update, which loses no digits to large means)."""
    count = moments.count + 1
    before = place - moments.mean
    mean = moments.mean + before / count
    after = place - mean
    deviations = jnp.concatenate([moments.deviations[1:], after[None]])
    return Moments(count, mean, moments.squares + before * after, deviations)


# --- Dropout in predictions too ---


class MCDropout(Descent):
    """Dropout that stays on in predictions, for models that have dropout anyway.

    It costs one training, of more steps than without dropout, and its memory. Do not use it where
    data shall decide how wide the posterior is: the rate `p` does. Try some on held-out examples.

    What the networks of different masks disagree on is the epistemic uncertainty (Gal and
    Ghahramani, 2016, "Dropout as a Bayesian Approximation: Representing Model Uncertainty in Deep
    Learning"). The model has `nn.Dropout` in it, and is called by `model(x, key=key)`. In training
    each example has masks of its own. A draw is one network, and has the same masks for all inputs;
    with `noise=None` it is the one without dropout.

    The fields are those of `bayes.MAP`.

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

    def check(self, problem: Problem) -> None:
        super().check(problem)
        network = problem.target.network
        rates = [layer.p for layer in nodes_of(Dropout, network)]
        if not any(not isinstance(p, int | float) or p > 0 for p in rates):
            raise ValueError(
                f"MCDropout: {type(network).__name__} has no dropout. Add `nn.Dropout(p=0.1)`, for "
                "instance before its last layer."
            )
        if not takes_key(network):
            raise ValueError(
                f"MCDropout calls the model by `model(x, key=key)`, and {type(network).__name__} "
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

    @property
    def remedy(self) -> str:
        return "A lower rate of dropout, or more steps, may help."

    def noise(self, num: int, key: PRNGKeyArray) -> Array:
        return jr.bits(key, (num, 2), jnp.uint32)

    def network(self, problem: Problem, unknowns: Unknowns) -> Any:
        network = problem.target.model(unknowns)
        if unknowns.noise is None:
            return network
        # A draw keeps its masks, whichever generator is the default by then.
        key = jr.wrap_key_data(unknowns.noise, impl="threefry2x32")
        network = inference_mode(network, False)
        return lambda x: network(x, key=key)
