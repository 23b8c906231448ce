"""MAP, and the base class of methods that run an optimiser."""

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

    def one(_: int, state: Optimised) -> Optimised:
        return descend(optimiser, loss, state)[0]

    return jax.lax.fori_loop(0, num, one, Optimised(place, optimiser.init(place))).place
