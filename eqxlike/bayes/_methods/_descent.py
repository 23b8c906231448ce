"""Methods that train networks: MAP, ensembles, SWAG and dropout in predictions."""

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

from ..._check_numbers import positive_number, real_number, whole_number
from ..._transforms import filter_eval_shape, filter_jit
from ...nn import Dropout, inference_mode
from ...nn._inputs import takes_key
from .._inference._method import Draws, Method, Problem, Record, Step, chosen
from .._libraries import as_libraries_compute
from .._posterior import Unknowns, nodes_of, num_examples, struct_of_example


class Optimised(NamedTuple):
    """A place, or what else descends, and what the optimiser keeps."""

    place: Any
    optimiser: Any


class Descent(Method):
    """The base of methods whose steps an optimiser makes. The fields are those of `bayes.MAP`."""

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
            f"the prior has unknowns of its own ({names}), and the density may have no highest "
            "point: where a scale goes to zero with the parameters below it, it grows without end. "
            "Fix the scale, or take a method that averages, such as `bayes.NUTS` or "
            "`bayes.MeanField`.",
        )

    @property
    def num_steps(self) -> int:
        return self.steps

    def init(self, problem: Problem, key: PRNGKeyArray) -> Optimised:
        place = self.first_place(problem, key)
        return Optimised(place, self._optimiser().init(place))

    def first_place(self, problem: Problem, key: PRNGKeyArray) -> Float[Array, " d"]:
        """Where descent begins."""
        return problem.initial(key)

    def step(self, problem: Problem, state: Optimised, index: Array, key: PRNGKeyArray) -> Step:
        state, value = descend(self._optimiser(), self.loss(problem, key), state)
        return state, {"loss": value}

    def loss(self, problem: Problem, key: PRNGKeyArray) -> Callable[[Array], Array]:
        """What a step makes smaller, a function of the place: minus the log density, by example."""
        batch = problem.batch(key, self.batch_size)
        return lambda place: -problem.batch_log_density(place, batch) / problem.target.num_data

    def finish(
        self, problem: Problem, states: Optimised, records: Record, key: PRNGKeyArray
    ) -> Float[Array, "c d"]:
        return states.place

    def sample(self, problem: Problem, found: Array, num: int, key: PRNGKeyArray) -> Draws:
        return jnp.broadcast_to(found, (num, found.shape[-1]))

    def diagnosed_at(self, problem: Problem, places: Float[Array, "c d"]) -> dict[str, Any]:
        """How far the log density rises from the places at which descent ended."""
        # All data at once may be more than memory holds, where no step has them.
        return {"rise": np.asarray(rise(problem, places))} if self.batch_size is None else {}

    def _optimiser(self) -> optax.GradientTransformationExtraArgs:
        schedule = optax.cosine_decay_schedule(self.learning_rate, self.steps)
        return optax.with_extra_args_support(self.optimiser or optax.adam(schedule))


class MAP(Descent):
    """The most probable unknowns, for a first look: what training with weight decay finds.

    It costs one training, and its memory. Do not use it where uncertainty about the network
    matters: its draws are all alike.

    The density is that of unknowns in linked space.

    - `steps`: of the optimiser.
    - `learning_rate`: of Adam (Kingma and Ba, 2015), falling to zero along a cosine.
    - `optimiser`: one of Optax in its place, such as `optax.lbfgs()`.
    - `batch_size`: examples in a step, drawn with replacement; all of them by default.

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
    """One step of an optimiser: where it leads, and the loss before it."""
    value, gradient = jax.value_and_grad(loss)(state.place)
    updates, kept = optimiser.update(
        gradient, state.optimiser, state.place, value=value, grad=gradient, value_fn=loss
    )
    place: Any = optax.apply_updates(state.place, updates)
    return Optimised(place, kept), value


def check_batch_size(method: Method, size: int | None, problem: Problem | None = None) -> None:
    """Raises `ValueError` unless `size`, a field of `method`, is `None` or a number of examples.

    **Arguments:**

    - `problem`: whose data has to have as many.
    """
    if size is None:
        return
    name = f"{type(method).__name__}: batch_size"
    whole_number(size, name)
    if problem is not None and size > problem.target.num_data:
        raise ValueError(
            f"{name} is {size}, and the data has {problem.target.num_data} examples: give a "
            "smaller one, or None for all of them."
        )


# --- Networks that are trained apart ---


# Of Adam in linked space, where the log of a scale is hardly 10 away.
_NOISE_RATE, _NOISE_STEPS = 0.05, 400


class StoppedEarly(NamedTuple):
    """A run that leaves out some examples, and where it predicted them best.

    - `place`, `optimiser`: as those of `Optimised`.
    - `order`: the numbers of all `N` examples, shuffled. Of `n` that are left out, a step with all
      data takes the mask `order < n`, one with a batch the first `n` in it.
    - `best_place`, `best_score`: where their mean log likelihood was greatest, and that mean.
    """

    place: Float[Array, " d"]
    optimiser: Any
    order: Int[Array, " N"]
    best_place: Float[Array, " d"]
    best_score: Float[Array, ""]


class DeepEnsemble(MAP):
    """Networks trained from different initial parameters, for uncertainty at any size.

    It costs `members` trainings, in one batch with the memory of all. Do not use it to widen the
    intervals of a small regression, unless `validation_fraction` is positive: each member
    underestimates the noise as `bayes.MAP` does.

    Their disagreement is the epistemic uncertainty (Lakshminarayanan, Pritzel and Blundell, 2017,
    "Simple and Scalable Predictive Uncertainty Estimation using Deep Ensembles"). Each begins with
    the parameters of the model shuffled within each array.

    - `members`: how many networks.
    - `validation_fraction`: the part of the examples that each network leaves out, drawn for each.
      It stops early, where it predicted them best, and the likelihood's own unknowns, such as a
      scale of noise, are then fitted to those of all together. With 0 none does.

    The other fields are those of `bayes.MAP`.

    >>> from eqxlike import bayes
    >>> method = bayes.DeepEnsemble(members=10, validation_fraction=0.1)
    """

    members: int = 5
    validation_fraction: float = 0.0

    def __check_init__(self):
        whole_number(self.members, "DeepEnsemble: members")
        fraction = real_number(self.validation_fraction, "DeepEnsemble: validation_fraction")
        if not 0 <= fraction < 1:
            raise ValueError(
                f"DeepEnsemble: validation_fraction must lie in [0, 1), got {fraction!r}."
            )

    def check(self, problem: Problem) -> None:
        super().check(problem)
        if self.validation_fraction and problem.target.num_data < 2:
            raise ValueError(
                f"DeepEnsemble: validation_fraction is {self.validation_fraction}, and the data "
                "has 1 example: there have to be one to leave out and one to train on."
            )

    @property
    def num_chains(self) -> int:
        return self.members

    def first_place(self, problem: Problem, key: PRNGKeyArray) -> Float[Array, " d"]:
        return problem.redrawn(key)

    def init(self, problem: Problem, key: PRNGKeyArray) -> Optimised | StoppedEarly:
        if not self.validation_fraction:
            return super().init(problem, key)
        order_key, key = jr.split(key)
        place, optimiser = super().init(problem, key)
        order = jr.permutation(order_key, problem.target.num_data)
        return StoppedEarly(place, optimiser, order, place, jnp.asarray(-jnp.inf, problem.dtype))

    def step(self, problem: Problem, state: Any, index: Array, key: PRNGKeyArray) -> Step:
        if not self.validation_fraction:
            return super().step(problem, state, index, key)
        before = Optimised(state.place, state.optimiser)
        loss = self._loss_of_rest(problem, state.order, key)
        after, value = descend(self._optimiser(), loss, before)
        record = {"loss": value}
        if self.batch_size is None:
            # The compiler takes the outputs from the forward pass of the loss.
            score = self._score(problem, state)
            record["validation_loss"] = -score
        else:
            # As often as it costs a batch a step, on average.
            every = math.ceil(self._num_left_out(problem) / self.batch_size)
            score = jax.lax.cond(
                index % every == 0,
                lambda: self._score(problem, state),
                lambda: jnp.full_like(state.best_score, jnp.nan),
            )
        best = _better(state, score)
        return StoppedEarly(*after, state.order, *best), record

    def finish(
        self, problem: Problem, states: Any, records: Record, key: PRNGKeyArray
    ) -> Float[Array, "c d"]:
        if not self.validation_fraction:
            return super().finish(problem, states, records, key)

        def of_one(state: StoppedEarly) -> Array:
            return _better(state, self._score(problem, state))[0]

        return self._with_noise(problem, states.order, jax.lax.map(of_one, states))

    def diagnosed_at(self, problem: Problem, places: Float[Array, "c d"]) -> dict[str, Any]:
        # A run that stops early is not meant to come to a mode.
        return {} if self.validation_fraction else super().diagnosed_at(problem, places)

    def sample(self, problem: Problem, found: Array, num: int, key: PRNGKeyArray) -> Draws:
        return chosen(found, num, key)

    def _num_left_out(self, problem: Problem) -> int:
        num_data = problem.target.num_data
        return min(max(round(self.validation_fraction * num_data), 1), num_data - 1)

    def _loss_of_rest(
        self, problem: Problem, order: Array, key: PRNGKeyArray
    ) -> Callable[[Array], Array]:
        """Minus the log density by example, with the log likelihood that the others indicate."""
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
        """The mean log likelihood of the examples that are left out."""
        target, num = problem.target, self._num_left_out(problem)
        unknowns = problem.unknowns(state.place)
        if self.batch_size is None:
            total = jnp.sum(target.log_likelihood(unknowns), where=state.order < num)
        else:

            def of_one(index: Array) -> Array:
                example = jtu.tree_map(lambda array: array[index][None], target.data)
                return target.log_likelihood(unknowns, example)[0]

            # No more outputs at once than a step has.
            size = min(self.batch_size, num)
            total = jnp.sum(jax.lax.map(of_one, state.order[:num], batch_size=size))
        return (total / num).astype(state.best_score.dtype)

    def _with_noise(
        self, problem: Problem, orders: Int[Array, "c N"], places: Float[Array, "c d"]
    ) -> Float[Array, "c d"]:
        """The places with the likelihood's own unknowns as the examples that were left out have
        them, which are further from outputs than those that the networks were trained on.
        """
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
            lambda leaf: leaf.reshape(-1, *leaf.shape[2:]),
            jax.lax.map(of_member, (orders, places)),
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
        own = jax.lax.fori_loop(
            0,
            _NOISE_STEPS,
            lambda _, state: descend(optimiser, loss, state)[0],
            Optimised(first, optimiser.init(first)),
        ).place

        def with_own(linked: Unknowns) -> Array:
            return problem.flatten(Unknowns(linked.model, own, linked.prior))

        return jax.vmap(with_own)(linked)


def _better(state: StoppedEarly, score: Array) -> tuple[Array, Array]:
    """The better one of the best place and the last, whose score this is, and its score."""
    # False for a score that is not a number.
    is_better = score > state.best_score
    best_place = jnp.where(is_better, state.place, state.best_place)
    return best_place, jnp.where(is_better, score, state.best_score)


# --- Networks that training wanders through ---


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


# --- How far below a mode an optimiser ended ---


_NUM_CLIMBS = 10
# So many halvings of a length leave nothing of it in float32.
_MAX_TRIALS = 30


class _ConjugateGradients(NamedTuple):
    """Where the method of conjugate gradients stands, and by how much it has risen."""

    place: Float[Array, " d"]
    direction: Float[Array, " d"]
    gradient: Float[Array, " d"]
    length: Float[Array, ""]
    risen: Float[Array, ""]


class _LineSearch(NamedTuple):
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
    return jax.lax.map(lambda place: climb(problem, place, _NUM_CLIMBS).risen / num, places)


def climb(problem: Problem, place: Float[Array, " d"], num: int) -> _ConjugateGradients:
    """Steps by the rule of Polak and Ribiere (Nocedal and Wright, 2006, "Numerical Optimization").

    **Arguments:**

    - `num`: how many.
    """

    def one(_: int, state: _ConjugateGradients) -> _ConjugateGradients:
        value, gradient = jax.value_and_grad(problem.log_density)(state.place)
        size = jnp.vdot(state.gradient, state.gradient)
        kept = jnp.vdot(gradient, gradient - state.gradient) / jnp.where(size > 0, size, 1)
        direction = gradient + jnp.maximum(kept, 0) * state.direction
        direction = jnp.where(jnp.vdot(direction, gradient) > 0, direction, gradient)
        size = jnp.linalg.norm(direction)
        first = jnp.where(state.length > 0, state.length, 1 / jnp.where(size > 0, size, 1))
        best, length = _line_search(problem, state.place, direction, value, first)
        place = state.place + length * direction
        # A density may have more digits than the place.
        risen = state.risen + (best - value).astype(state.risen.dtype)
        return _ConjugateGradients(place, direction, gradient, length, risen)

    zeros, zero = jnp.zeros_like(place), jnp.zeros((), place.dtype)
    return jax.lax.fori_loop(0, num, one, _ConjugateGradients(place, zeros, zeros, zero, zero))


def _line_search(
    problem: Problem, place: Array, direction: Array, value: Array, first: Array
) -> tuple[Array, Array]:
    """The greatest log density, and its length, of one doubled or halved while that helps."""

    def attempt(state: _LineSearch) -> _LineSearch:
        count, best, best_length, length, factor, _ = state
        found = problem.log_density(place + length * direction).astype(best.dtype)
        is_better = found > best
        factor = jnp.where((count == 0) & is_better, 2.0, factor).astype(factor.dtype)
        goes_on = (count < _MAX_TRIALS) & (is_better | (best_length == 0))
        best = jnp.where(is_better, found, best)
        best_length = jnp.where(is_better, length, best_length)
        return _LineSearch(count + 1, best, best_length, factor * length, factor, goes_on)

    half = jnp.asarray(0.5, first.dtype)
    begin = _LineSearch(
        jnp.zeros((), jnp.int32), value, jnp.zeros_like(first), first, half, jnp.asarray(True)
    )
    found = jax.lax.while_loop(lambda state: state.goes_on, attempt, begin)
    return found.best, found.best_length
