"""Ensembles: networks that are trained apart."""

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
    """Networks trained from different initial parameters, for uncertainty at any size.

    It costs `members` trainings. Do not use it to widen the intervals of a small regression: each
    member underestimates the noise as `bayes.MAP` does. `bayes.EarlyStoppedEnsemble` does not.

    The disagreement of the members is the epistemic uncertainty (Lakshminarayanan, Pritzel and
    Blundell, 2017, "Simple and Scalable Predictive Uncertainty Estimation using Deep Ensembles").
    Each member trains on all data, and begins with the parameters of the model shuffled within each
    array.

    Members train in one batch, except on a CPU where the activations of all members exceed its
    cache: there they train one after another. `chain_method` of `bayes.infer` overrides this.

    - `members`: number of networks.

    The other fields are those of `bayes.MAP`.

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
        # A hidden layer has about the square root of the unknowns for its width. Measured on two
        # cores for networks of 700 to 170,000 unknowns and 500 to 8,000 examples.
        num = self.batch_size or problem.target.num_data
        activations = self.members * num * math.sqrt(problem.size)
        return jax.default_backend() == "cpu" and activations > 1.6e6

    def first_place(self, problem: Problem, key: PRNGKeyArray) -> Float[Array, " d"]:
        return problem.redrawn(key)

    def sample(self, problem: Problem, found: Array, num: int, key: PRNGKeyArray) -> Draws:
        return chosen(found, num, key)


# --- Networks that stop early ---


# Of Adam in linked space, where the log of a scale is hardly 10 away.
_NOISE_RATE, _NOISE_STEPS = 0.05, 400


class StoppedEarly(NamedTuple):
    """A run that leaves out some examples, and where it predicted them best.

    - `place`, `optimiser`: the fields of `Optimised`.
    - `order`: the numbers of all `N` examples, shuffled. Of `n` that are left out, a step with all
      data takes the mask `order < n`, one with a batch the first `n` in it.
    - `best_place`, `best_score`: where their mean log likelihood was greatest, and that mean.
    """

    place: Float[Array, " d"]
    optimiser: Any
    order: Int[Array, " N"]
    best_place: Float[Array, " d"]
    best_score: Float[Array, ""]


class EarlyStoppedEnsemble(DeepEnsemble):
    """A deep ensemble whose members stop early and measure the noise, the method to begin with.

    It costs `members` trainings. Do not use it where few examples can be spared for validation.

    Each member draws the examples that it leaves out, and stops where it predicts them best. The
    likelihood's own unknowns, such as the scale of the noise, are then fitted to the examples that
    were left out, of all members together: networks predict these less closely than the examples
    that they were trained on. The members are no draws from the posterior.

    - `members`: number of networks.
    - `validation_fraction`: the part of the examples that each member leaves out.

    The other fields are those of `bayes.MAP`.

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
                "EarlyStoppedEnsemble needs at least 2 examples, one to leave out and one to train "
                "on; the data has 1."
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
        return StoppedEarly(*after, state.order, *_better(state, score)), record

    def finish(
        self, problem: Problem, states: StoppedEarly, records: Record, key: PRNGKeyArray
    ) -> Float[Array, "c d"]:
        def of_one(state: StoppedEarly) -> Array:
            return _better(state, self._score(problem, state))[0]

        return self._with_noise(problem, states.order, jax.lax.map(of_one, states))

    def diagnosed(self, problem: Problem, found: Array) -> dict[str, Any]:
        # A run that stops early is not meant to come to a mode.
        return {}

    def _num_left_out(self, problem: Problem) -> int:
        num_data = problem.target.num_data
        return min(max(round(self.validation_fraction * num_data), 1), num_data - 1)

    def _loss_of_rest(
        self, problem: Problem, order: Array, key: PRNGKeyArray
    ) -> Callable[[Array], Array]:
        """Minus the log density for each example, estimated from the examples that are kept."""
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
        """Fits the likelihood's own unknowns to the examples that were left out, and puts them into
        all places. Networks predict these examples less closely than those they were trained on.
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
