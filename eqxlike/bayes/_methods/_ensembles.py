"""Ensembles of independently trained networks."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jax.random as jr
import jax.tree_util as jtu
import optax
from jaxtyping import Array, Float, Int, PRNGKeyArray

from ..._check_numbers import real_number, whole_number
from .._inference._method import Draws, Problem, Record, Step, chosen
from .._posterior import Unknowns
from ._descent import MAP, Optimised, descend


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
    """The best unknowns so far and their score, given the score of the current unknowns."""
    # A NaN score is not better, because comparisons with NaN are false.
    is_better = score > state.best_score
    best_place = jnp.where(is_better, state.place, state.best_place)
    return best_place, jnp.where(is_better, score, state.best_score)
