"""What the Markov chains have in common that move by gradients of minibatches."""

import abc
from collections.abc import Callable
from typing import Any

import jax
import jax.random as jr
from jaxtyping import Array, Float, PRNGKeyArray

from ..._numbers import positive_number, real_number, whole_number
from .._inference import Problem, Record
from ._batch_size import check_batch_size
from ._chain import MarkovChain
from ._deep_ensemble import DeepEnsemble

Place = Float[Array, " d"]


class StochasticGradient(MarkovChain):
    """The base of SGLD and SGHMC. A step refuses nothing, and needs the gradient of a batch alone.

    - `num_samples`: draws that each chain keeps.
    - `num_warmup`: steps before that.
    - `chains`: how many there are.
    - `thin`: of how many steps one is kept.
    - `step_size`: as a learning rate: of gradient descent on minus the log density over `N`, the
      number of examples. It is the same for more data of the same kind.
    - `decay`: the step size of step `t` is `step_size * (1 + t / num_warmup)**-decay`; 0 for a
      constant one.
    - `batch_size`: examples in a gradient, drawn with replacement; all of them by default.
    - `temperature`: the posterior is found to the power of `1 / temperature`.
    - `descent_steps`: of `bayes.MAP`, from where the chain begins to a mode.
    """

    num_warmup: int = 5000
    thin: int = 50
    step_size: float = 1e-3
    decay: float = 0.0
    batch_size: int | None = None
    temperature: float = 1.0
    descent_steps: int = 1000

    def __check_init__(self):
        name = type(self).__name__
        positive_number(self.step_size, f"{name}: step_size")
        positive_number(self.temperature, f"{name}: temperature")
        if not 0 <= real_number(self.decay, f"{name}: decay") <= 1:
            raise ValueError(f"{name}: decay must lie in [0, 1], got {self.decay}.")
        whole_number(self.descent_steps, f"{name}: descent_steps", least=0)
        check_batch_size(self, self.batch_size)

    def check(self, problem: Problem) -> None:
        check_batch_size(self, self.batch_size, problem)

    def init(self, problem: Problem, key: PRNGKeyArray) -> Place:
        place_key, key = jr.split(key)
        if not self.descent_steps:
            return problem.redrawn(place_key)
        # Chains begin where the members of an ensemble end.
        descent = DeepEnsemble(steps=self.descent_steps, batch_size=self.batch_size)

        def one(index: Array, state: Any) -> Any:
            return descent.step(problem, state, index, jr.fold_in(key, index))[0]

        first = descent.init(problem, place_key)
        return jax.lax.fori_loop(0, self.descent_steps, one, first).place

    def step(
        self, problem: Problem, state: Place, index: Array, key: PRNGKeyArray
    ) -> tuple[Place, Record]:
        batch_key, key = jr.split(key)
        batch = problem.batch(batch_key, self.batch_size)

        def gradient(place: Place, batch: Any) -> Place:
            return jax.grad(lambda place: problem.batch_log_density(place, batch))(place)

        shrunk = (1 + index / max(1, self.num_warmup)) ** -self.decay
        place = self.move(
            key, state, gradient, batch, self.step_size * shrunk, problem.target.num_data
        )
        place = place.astype(state.dtype)
        return place, {"draw": place}

    @abc.abstractmethod
    def move(
        self,
        key: PRNGKeyArray,
        place: Place,
        gradient: Callable[[Place, Any], Place],
        batch: Any,
        step_size: Array,
        num_data: int,
    ) -> Place:
        """One transition by BlackJAX."""
