"""Methods whose steps an optimiser makes: their base, and MAP."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, PRNGKeyArray

from ... import filter_jit
from ..._check_numbers import positive_number, whole_number
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


@as_libraries_compute()
@filter_jit(compiler_options=ONCE)
def rise(problem: Problem, places: Float[Array, "c d"]) -> Float[Array, " c"]:
    """By how many nats ten steps of L-BFGS raise the log density, from each place.

    They are counted for each unknown, or for each example where those are fewer: of a normal
    posterior a draw lies half a nat for each unknown below the mode. There is at least as much
    between the place and the mode: nothing where an optimiser came to it, and, since no learning
    rate keeps these steps short, much where one stopped before it.
    """
    num = min(problem.size, problem.target.num_data)

    def of_place(place: Array) -> Array:
        above = problem.log_density(climb(problem, place, _NUM_CLIMBS))
        return jnp.maximum(above - problem.log_density(place), 0) / num

    return jax.lax.map(of_place, places)


def climb(problem: Problem, place: Float[Array, " d"], num: int) -> Float[Array, " d"]:
    """Where `num` steps of L-BFGS lead, towards a mode."""
    # With the default line search, compilation took 1.4 times as long.
    search = optax.scale_by_backtracking_linesearch(_MAX_TRIALS)
    optimiser = optax.lbfgs(linesearch=search)

    def loss(place: Array) -> Array:
        # A density may have more digits than the place.
        return -problem.log_density(place).astype(place.dtype)

    def one(_: int, state: Optimised) -> Optimised:
        return descend(optimiser, loss, state)[0]

    return jax.lax.fori_loop(0, num, one, Optimised(place, optimiser.init(place))).place
