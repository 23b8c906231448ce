"""Methods whose steps an optimiser makes: their base, and MAP."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, PRNGKeyArray

from ..._check_numbers import positive_number, whole_number
from ..._transforms import filter_jit
from .._inference._method import Draws, Method, Problem, Record, Step
from .._libraries import ONCE, as_libraries_compute


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

    @property
    def is_descent(self) -> bool:
        return True

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
@filter_jit(compiler_options=ONCE)
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
