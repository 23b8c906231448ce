"""The most probable parameters, of one network or of an ensemble."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, PRNGKeyArray

from ..._numbers import positive_number, whole_number
from ..._transforms import filter_jit
from .._inference import Method, Problem, Record, chosen
from .._library_rules import as_libraries_compute


class Optimised(NamedTuple):
    """A place, or what else descends, and what the optimiser keeps."""

    place: Any
    optimiser: Any


class MAP(Method):
    """The most probable unknowns, by gradient descent: what training with weight decay finds.

    The density is that of unknowns in linked space. Draws are all alike, so predictions know no
    epistemic uncertainty.

    - `steps`: of the optimiser.
    - `learning_rate`: of Adam (Kingma and Ba, 2015), falling to zero along a cosine.
    - `optimiser`: one of Optax in its place, such as `optax.lbfgs()`.
    - `batch_size`: examples in a step, drawn with replacement; all of them by default.

    >>> from eqxlike import bayes
    >>> method = bayes.MAP(steps=500, learning_rate=0.01)
    """

    steps: int = 2000
    learning_rate: float = 0.01
    optimiser: optax.GradientTransformation | None = None
    batch_size: int | None = None

    def __check_init__(self):
        name = type(self).__name__
        whole_number(self.steps, f"{name}: steps")
        positive_number(self.learning_rate, f"{name}: learning_rate")
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

    def step(
        self, problem: Problem, state: Optimised, index: Array, key: PRNGKeyArray
    ) -> tuple[Optimised, Record]:
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

    def sample(
        self, problem: Problem, found: Array, num: int, key: PRNGKeyArray
    ) -> Float[Array, "S d"]:
        return jnp.broadcast_to(found, (num, found.shape[-1]))

    def num_found(self, found: Any) -> int:
        return 1

    def diagnosed(self, problem: Problem, found: Array) -> dict[str, Any]:
        # All data at once may be more than memory holds, where no step has them.
        return {"rise": np.asarray(rise(problem, found))} if self.batch_size is None else {}

    def _optimiser(self) -> optax.GradientTransformationExtraArgs:
        if self.optimiser is not None:
            return optax.with_extra_args_support(self.optimiser)
        schedule = optax.cosine_decay_schedule(self.learning_rate, self.steps)
        return optax.with_extra_args_support(optax.adam(schedule))


def descend(
    optimiser: optax.GradientTransformationExtraArgs,
    loss: Callable[[Any], Array],
    state: Optimised,
) -> tuple[Optimised, Array]:
    """One step of an optimiser: where it leads, and the loss before it."""
    value, gradient = jax.value_and_grad(loss)(state.place)
    updates, kept = optimiser.update(
        gradient, state.optimiser, state.place, value=value, grad=gradient, value_fn=loss
    )
    place: Any = optax.apply_updates(state.place, updates)
    return Optimised(place, kept), value


# --- Networks that are trained apart ---


class DeepEnsemble(MAP):
    """Networks that are trained from different initial parameters, together in one batch.

    Their disagreement is the epistemic uncertainty (Lakshminarayanan, Pritzel and Blundell, 2017,
    "Simple and Scalable Predictive Uncertainty Estimation using Deep Ensembles").
    Each begins with the parameters of the model shuffled within each array, which for an
    initialiser that draws independent numbers is a draw of its own.

    - `members`: how many networks.

    The other fields are those of `bayes.MAP`.

    >>> from eqxlike import bayes
    >>> method = bayes.DeepEnsemble(members=10)
    """

    members: int = 5

    def __check_init__(self):
        whole_number(self.members, "DeepEnsemble: members")

    @property
    def num_chains(self) -> int:
        return self.members

    def first_place(self, problem: Problem, key: PRNGKeyArray) -> Float[Array, " d"]:
        return problem.redrawn(key)

    def sample(
        self, problem: Problem, found: Array, num: int, key: PRNGKeyArray
    ) -> Float[Array, "S d"]:
        return chosen(found, num, key)

    def num_found(self, found: Any) -> int:
        return self.members


# --- How far below a mode an optimiser ended ---


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


# --- The number of examples in a step ---


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
