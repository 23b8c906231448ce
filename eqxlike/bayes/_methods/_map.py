"""The most probable parameters."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, PRNGKeyArray

from ..._numbers import positive_number, whole_number
from .._inference import Method, Problem, Record
from ._batch_size import check_batch_size
from ._rise import rise


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
