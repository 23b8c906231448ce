"""Methods that run an optimiser on one network or several: MAP, ensembles, SWAG and dropout."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jax.random as jr
import jax.tree_util as jtu
import numpy as np
import optax
from jaxtyping import Array, Float, Int, PRNGKeyArray

from ... import filter_eval_shape, filter_jit
from ..._check_numbers import positive_number, real_number, whole_number
from ..._compat import Tracer
from ...nn import Dropout, inference_mode
from ...nn._inputs import takes_key
from .._libraries import ONCE, as_libraries_compute
from .._method import Draws, Method, Problem, Record, Step, chosen
from .._posterior import Unknowns, nodes_of, num_examples, struct_of_example


class Optimised(NamedTuple):
    """Optimised parameters and the state of the optimiser."""

    place: Any
    optimiser: Any


class Descent(Method):
    """Base of methods that run an optimiser. It has the fields of `bayes.MAP`."""

    is_descent = True

    steps: int = 2000
    learning_rate: float = 0.01
    optimiser: optax.GradientTransformation | None = None
    batch_size: int | None = None

    def __check_init__(self):
        name = type(self).__name__
        whole_number(self.steps, f"{name}: steps")
        positive_number(self.learning_rate, f"{name}: learning_rate")
        if self.optimiser is not None and not hasattr(self.optimiser, "update"):
            raise TypeError(
                f"{name}: optimiser must be an optax.GradientTransformation, such as "
                f"`optax.adam(1e-3)`; got {self.optimiser!r}."
            )
        check_batch_size(self, self.batch_size)

    def check(self, problem: Problem) -> None:
        check_batch_size(self, self.batch_size, problem)

    def doubts(self, problem: Problem) -> tuple[str, ...]:
        names = ", ".join(problem.target.hyperprior_names())
        if not names:
            return ()
        return (
            f"the prior has unknowns of its own ({names}), so the density may have no maximum: it "
            "can grow without bound when a scale and the parameters with that scale go to zero. "
            "Fix the scale, or use `bayes.NUTS` or `bayes.MeanField`.",
        )

    @property
    def num_steps(self) -> int:
        return self.steps

    def init(self, problem: Problem, key: PRNGKeyArray) -> Optimised:
        place = self.first_place(problem, key)
        return Optimised(place, self._optimiser().init(place))

    def first_place(self, problem: Problem, key: PRNGKeyArray) -> Float[Array, " d"]:
        """The initial unknowns."""
        return problem.initial(key)

    def step(self, problem: Problem, state: Optimised, index: Array, key: PRNGKeyArray) -> Step:
        state, value = descend(self._optimiser(), self.loss(problem, key), state)
        return state, {"loss": value}

    def loss(self, problem: Problem, key: PRNGKeyArray) -> Callable[[Array], Array]:
        """The loss of a step: the negative log density divided by the number of examples."""
        batch = problem.batch(key, self.batch_size)
        return lambda place: -problem.batch_log_density(place, batch) / problem.target.num_data

    def finish(
        self, problem: Problem, states: Optimised, records: Record, key: PRNGKeyArray
    ) -> Float[Array, "c d"]:
        return states.place

    def sample(self, problem: Problem, found: Array, num: int, key: PRNGKeyArray) -> Draws:
        return jnp.broadcast_to(found, (num, found.shape[-1]))

    def diagnosed_at(self, problem: Problem, places: Float[Array, "c d"]) -> dict[str, Any]:
        """`Diagnostics.rise` at the final unknowns of each run."""
        # Not computed if steps use minibatches, because the whole data set may not fit in memory.
        return {"rise": np.asarray(rise(problem, places))} if self.batch_size is None else {}

    def _optimiser(self) -> optax.GradientTransformationExtraArgs:
        schedule = optax.cosine_decay_schedule(self.learning_rate, self.steps)
        return optax.with_extra_args_support(self.optimiser or optax.adam(schedule))


class MAP(Descent):
    """Maximum a posteriori: the most probable unknowns, as found by training with weight decay.

    It costs as much time and memory as ordinary training. Do not use it if uncertainty about the
    network matters, because all its draws are the same. The density is maximised in linked space.

    - `steps`: number of optimiser steps.
    - `learning_rate`: initial learning rate of Adam (Kingma and Ba, 2015), with cosine decay to
      zero.
    - `optimiser`: an Optax optimiser to use instead of Adam, such as `optax.lbfgs()`.
    - `batch_size`: examples per step, drawn with replacement; all examples by default.

    >>> from eqxlike import bayes
    >>> method = bayes.MAP(steps=500, learning_rate=0.01)
    """

    def num_found(self, found: Any) -> int:
        return self.num_chains

    def diagnosed(self, problem: Problem, found: Array) -> dict[str, Any]:
        return self.diagnosed_at(problem, found)


def descend(
    optimiser: optax.GradientTransformationExtraArgs, loss: Callable[[Any], Array], state: Optimised
) -> tuple[Optimised, Array]:
    """One step of an optimiser: the new state, and the loss before the step."""
    value, gradient = jax.value_and_grad(loss)(state.place)
    updates, kept = optimiser.update(
        gradient, state.optimiser, state.place, value=value, grad=gradient, value_fn=loss
    )
    place: Any = optax.apply_updates(state.place, updates)
    return Optimised(place, kept), value


def minimise(
    optimiser: optax.GradientTransformationExtraArgs, loss: Callable, place: Any, num: int
) -> Any:
    """The result of `num` steps of an optimiser from `place`."""

    def one(_: int, state: Optimised) -> Optimised:
        return descend(optimiser, loss, state)[0]

    return jax.lax.fori_loop(0, num, one, Optimised(place, optimiser.init(place))).place


def check_batch_size(method: Method, size: int | None, problem: Problem | None = None) -> None:
    """Raises `ValueError` unless the batch size is `None` or a positive integer.

    **Arguments:**

    - `problem`: if given, its data must have at least `size` examples.
    """
    if size is None:
        return
    name = f"{type(method).__name__}: batch_size"
    whole_number(size, name)
    if problem is not None and size > problem.target.num_data:
        raise ValueError(
            f"{name} is {size}, but the data has only {problem.target.num_data} examples: pass a "
            "smaller batch size, or None to use all examples."
        )


# --- Distance of an optimiser's result from a mode ---


_NUM_CLIMBS = 10
# Maximum number of halvings of a step. A step that was halved this often is below the resolution of
# float32.
_MAX_BACKTRACKS = 30


@as_libraries_compute()
@filter_jit(compiler_options=ONCE)
def rise(problem: Problem, places: Float[Array, "c d"]) -> Float[Array, " c"]:
    """Increase of the log density by ten steps of L-BFGS, from the end of each optimiser run.

    The unit is nats per unknown, or nats per example if there are fewer examples than unknowns. A
    draw from a normal posterior lies half a nat per unknown below the mode. The mode lies at least
    this increase above the end of the run. The increase is near 0 if the optimiser converged. It is
    large if the optimiser stopped early, because no learning rate limits the steps of L-BFGS.
    """
    num = min(problem.size, problem.target.num_data)

    def of_place(place: Array) -> Array:
        above = problem.log_density(climb(problem, place, _NUM_CLIMBS))
        return jnp.maximum(above - problem.log_density(place), 0) / num

    return jax.lax.map(of_place, places)


def climb(problem: Problem, place: Float[Array, " d"], num: int) -> Float[Array, " d"]:
    """The result of `num` steps of L-BFGS towards a mode."""
    # Optax's default line search takes 1.4 times as long to compile.
    search = optax.scale_by_backtracking_linesearch(_MAX_BACKTRACKS)
    optimiser = optax.lbfgs(linesearch=search)

    def loss(place: Array) -> Array:
        # The log density may have a wider dtype than `place`.
        return -problem.log_density(place).astype(place.dtype)

    return minimise(optimiser, loss, place, num)


# --- Ensembles of independently trained networks ---


class DeepEnsemble(MAP):
    """Networks trained from different initial parameters, for models of any size.

    It costs as much as training `members` networks. Do not use it for regression with few examples
    if you need intervals that are wide enough. Each member then underestimates the noise, as
    `bayes.MAP` does. Use `bayes.EarlyStoppedEnsemble` instead.

    The disagreement of the members is the epistemic uncertainty (Lakshminarayanan, Pritzel and
    Blundell, 2017, "Simple and Scalable Predictive Uncertainty Estimation using Deep Ensembles").
    Each member trains on all data. Its initial parameters are the parameters of the model, shuffled
    within each array.

    Members train in one batch. On a CPU, they train one after another if the activations of all
    members probably exceed the cache, judged by the numbers of unknowns and examples.
    `chain_method` of `bayes.infer` overrides this choice.

    - `members`: number of networks.

    The other fields are described in `bayes.MAP`.

    >>> from eqxlike import bayes
    >>> method = bayes.DeepEnsemble(members=10)
    """

    members: int = 5

    def __check_init__(self):
        whole_number(self.members, f"{type(self).__name__}: members")

    @property
    def num_chains(self) -> int:
        return self.members

    def runs_apart(self, problem: Problem) -> bool:
        # The width of a hidden layer is about the square root of the number of unknowns. The limit
        # on `activations` was measured on two cores, for networks of 700 to 170,000 unknowns and
        # 500 to 8,000 examples.
        num = self.batch_size or problem.target.num_data
        activations = self.members * num * math.sqrt(problem.size)
        is_large = problem.size > 200 and activations > 1.6e6
        return jax.default_backend() == "cpu" and is_large

    def first_place(self, problem: Problem, key: PRNGKeyArray) -> Float[Array, " d"]:
        return problem.redrawn(key)

    def sample(self, problem: Problem, found: Array, num: int, key: PRNGKeyArray) -> Draws:
        return chosen(found, num, key)


# --- Ensembles with early stopping ---


# Learning rate and number of steps of Adam for the likelihood's unknowns in linked space. The log
# of a scale has to move by at most about 10.
_NOISE_RATE, _NOISE_STEPS = 0.05, 400


class StoppedEarly(NamedTuple):
    """The state of training with validation examples, with the best unknowns so far.

    - `place`, `optimiser`: the fields of `Optimised`.
    - `order`: a permutation of the `N` example indices, which chooses `n` validation examples. For
      steps with all data, example `i` is a validation example if `order[i] < n`. For steps with
      batches, the validation examples have the indices `order[:n]`.
    - `best_place`, `best_score`: the unknowns with the greatest mean log likelihood of the
      validation examples, and that mean.
    """

    place: Float[Array, " d"]
    optimiser: Any
    order: Int[Array, " N"]
    best_place: Float[Array, " d"]
    best_score: Float[Array, ""]


class EarlyStoppedEnsemble(DeepEnsemble):
    """A deep ensemble with early stopping and a fitted noise scale. Try this method first.

    It costs as much as training `members` networks. Do not use it if no examples can be spared for
    validation.

    Each member has its own random validation examples, and keeps the parameters that predict them
    best. Then the likelihood's own unknowns, such as the scale of the noise, are fitted to the
    validation examples of all members. Training examples would underestimate the noise, because the
    networks fit them too closely. The members are not draws from the posterior.

    - `members`: number of networks.
    - `validation_fraction`: fraction of the examples that each member uses for validation.

    The other fields are described in `bayes.MAP`.

    >>> from eqxlike import bayes
    >>> method = bayes.EarlyStoppedEnsemble(members=5, validation_fraction=0.1)
    """

    validation_fraction: float = 0.1

    def __check_init__(self):
        name = "EarlyStoppedEnsemble: validation_fraction"
        fraction = real_number(self.validation_fraction, name)
        if not 0 < fraction < 1:
            raise ValueError(f"{name} must lie in (0, 1), got {fraction!r}.")

    def check(self, problem: Problem) -> None:
        super().check(problem)
        if problem.target.num_data < 2:
            raise ValueError(
                "EarlyStoppedEnsemble needs at least 2 examples, one for validation and one for "
                "training; the data has 1."
            )

    def init(self, problem: Problem, key: PRNGKeyArray) -> StoppedEarly:
        order_key, key = jr.split(key)
        place, optimiser = super().init(problem, key)
        order = jr.permutation(order_key, problem.target.num_data)
        return StoppedEarly(place, optimiser, order, place, jnp.asarray(-jnp.inf, problem.dtype))

    def step(self, problem: Problem, state: StoppedEarly, index: Array, key: PRNGKeyArray) -> Step:
        before = Optimised(state.place, state.optimiser)
        loss = self._loss_of_rest(problem, state.order, key)
        after, value = descend(self._optimiser(), loss, before)
        record = {"loss": value}
        if self.batch_size is None:
            # The score is cheap, because XLA reuses the outputs from the forward pass of the loss.
            score = self._score(problem, state)
            record["validation_loss"] = -score
        else:
            # Compute the score only at every n-th step, so that on average validation processes at
            # most one batch per step.
            every = math.ceil(self._num_left_out(problem) / self.batch_size)
            score = jax.lax.cond(
                index % every == 0,
                lambda: self._score(problem, state),
                lambda: jnp.full_like(state.best_score, jnp.nan),
            )
        return StoppedEarly(*after, state.order, *_better(state, score)), record

    def finish(
        self, problem: Problem, states: StoppedEarly, records: Record, key: PRNGKeyArray
    ) -> Float[Array, "c d"]:
        def of_one(state: StoppedEarly) -> Array:
            return _better(state, self._score(problem, state))[0]

        return self._with_noise(problem, states.order, jax.lax.map(of_one, states))

    def diagnosed(self, problem: Problem, found: Array) -> dict[str, Any]:
        # A run with early stopping does not aim at a mode, so its distance from a mode is not
        # reported.
        return {}

    def _num_left_out(self, problem: Problem) -> int:
        num_data = problem.target.num_data
        return min(max(round(self.validation_fraction * num_data), 1), num_data - 1)

    def _loss_of_rest(
        self, problem: Problem, order: Array, key: PRNGKeyArray
    ) -> Callable[[Array], Array]:
        """The negative log density per example, estimated from the training examples."""
        target, num = problem.target, self._num_left_out(problem)
        if self.batch_size is not None:
            rest = order[jr.randint(key, (self.batch_size,), num, target.num_data)]
            batch = jtu.tree_map(lambda array: array[rest], target.data)
            return lambda place: -problem.batch_log_density(place, batch) / target.num_data

        def loss(place: Array) -> Array:
            unknowns, log_det = target.constrain(problem.unflatten(place))
            of_rest = jnp.sum(target.log_likelihood(unknowns), where=order >= num)
            log_prior = target.log_prior(unknowns) + log_det
            return -of_rest / (target.num_data - num) - log_prior / target.num_data

        return problem.differentiable(loss)

    def _score(self, problem: Problem, state: StoppedEarly) -> Float[Array, ""]:
        """The mean log likelihood of the validation examples."""
        target, num = problem.target, self._num_left_out(problem)
        unknowns = problem.unknowns(state.place)
        if self.batch_size is None:
            total = jnp.sum(target.log_likelihood(unknowns), where=state.order < num)
        else:

            def of_one(index: Array) -> Array:
                example = jtu.tree_map(lambda array: array[index][None], target.data)
                return target.log_likelihood(unknowns, example)[0]

            # Use no larger batches than the training steps.
            size = min(self.batch_size, num)
            total = jnp.sum(jax.lax.map(of_one, state.order[:num], batch_size=size))
        return (total / num).astype(state.best_score.dtype)

    def _with_noise(
        self, problem: Problem, orders: Int[Array, "c N"], places: Float[Array, "c d"]
    ) -> Float[Array, "c d"]:
        """Fits the likelihood's own unknowns to the validation examples of all members."""
        target, linked = problem.target, jax.vmap(problem.unflatten)(places)
        if not jtu.tree_leaves(linked.likelihood):
            return places
        num, one = self._num_left_out(problem), problem.unflatten(places[0])

        def of_member(pair: tuple[Array, Array]) -> tuple[Any, Any]:
            order, place = pair
            left_out = (jnp.argsort(order) if self.batch_size is None else order)[:num]
            x, y = jtu.tree_map(lambda array: array[left_out], target.data)
            network = target.model(problem.unknowns(place))
            return jax.lax.map(network, x, batch_size=min(self.batch_size or num, num)), y

        pairs = jtu.tree_map(
            lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), jax.lax.map(of_member, (orders, places))
        )

        def loss(own: Any) -> Array:
            unknowns, log_det = target.constrain(Unknowns(one.model, own, one.prior))
            log_probs = jax.vmap(
                lambda output, y: target.likelihood.log_prob(output, unknowns.likelihood, y)
            )(*pairs)
            log_prior = target.log_prior(unknowns) + log_det
            return -(jnp.sum(log_probs) + log_prior) / log_probs.size

        optimiser = optax.with_extra_args_support(optax.adam(_NOISE_RATE))
        first = jtu.tree_map(lambda leaf: jnp.mean(leaf, axis=0), linked.likelihood)
        own = minimise(optimiser, loss, first, _NOISE_STEPS)

        def with_own(linked: Unknowns) -> Array:
            return problem.flatten(Unknowns(linked.model, own, linked.prior))

        return jax.vmap(with_own)(linked)


def _better(state: StoppedEarly, score: Array) -> tuple[Array, Array]:
    """The best unknowns so far and their score, given the score of the current unknowns."""
    # A NaN score is not better, because comparisons with NaN are false.
    is_better = score > state.best_score
    best_place = jnp.where(is_better, state.place, state.best_place)
    return best_place, jnp.where(is_better, score, state.best_score)


# --- SWAG ---


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
