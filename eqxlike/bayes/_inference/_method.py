"""What a method of inference is."""

import abc
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import jax.random as jr
import jax.tree_util as jtu
import numpy as np
from jaxtyping import Array, Float, PRNGKeyArray, Shaped

from ..._module import Module
from .._unknowns import Unknowns
from ._problem import Problem

State = Any
"""What a step changes: a pytree of arrays."""

Record = Mapping[str, Shaped[Array, "..."]]
"""What is kept of a step, by name."""


class Method(Module):
    """How a posterior is found: pure functions over a state.

    `bayes.infer` runs `init`, `num_steps` times `step`, and `finish`, for `num_chains` chains side
    by side; `sample` then draws from what `finish` returned. All of them are traced, and work on
    the vector of unknowns in linked space that a `Problem` has. `S` draws have `d` numbers each.

    A step may record whatever helps. Some names mean something to `bayes.FittedPosterior`: `draw`,
    the place of a chain, gives R-hat, effective sample sizes and the draws of `to_arviz`;
    `log_density`, `acceptance`, `is_divergent` and `energy` go into its diagnostics; `loss` is what
    an optimiser makes smaller.
    """

    @property
    def num_chains(self) -> int:
        """How many independent runs there are, each with a state of its own."""
        return 1

    @property
    @abc.abstractmethod
    def num_steps(self) -> int:
        """The number of steps of a run."""

    @property
    def num_dropped(self) -> int:
        """The number of steps at the beginning of which no record is kept."""
        return 0

    @property
    def thinning(self) -> int:
        """Of how many steps after those one record is kept."""
        return 1

    def check(self, problem: Problem) -> None:
        """Raises `ValueError` or `TypeError` if the method cannot serve the target."""

    def doubts(self, problem: Problem) -> tuple[str, ...]:
        """What may make a poor posterior of this target, in words: warnings before the run."""
        return ()

    @abc.abstractmethod
    def init(self, problem: Problem, key: PRNGKeyArray) -> State:
        """The state of a chain before its first step."""

    @abc.abstractmethod
    def step(
        self, problem: Problem, state: State, index: Array, key: PRNGKeyArray
    ) -> tuple[State, Record]:
        """One step of one chain.

        **Arguments:**

        - `index`: the number of the step, from 0.
        - `key`: that of this step alone.
        """

    def finish(self, problem: Problem, states: State, records: Record, key: PRNGKeyArray) -> Any:
        """What draws are made from; by default the last states.

        **Arguments:**

        - `states`: the last ones, with a leading axis of chains.
        - `records`: what was kept, with leading axes of chains and of records.
        """
        return states

    @abc.abstractmethod
    def sample(
        self, problem: Problem, found: Any, num: int, key: PRNGKeyArray
    ) -> Float[Array, "S d"]:
        """Draws from the posterior, `S = num` of them.

        **Arguments:**

        - `found`: what `finish` returned.
        """

    def num_found(self, found: Any) -> int | None:
        """How many draws there are; `None` where new ones can be made without end."""
        return None

    # --- what some methods have of their own ---

    def noise(self, num: int, key: PRNGKeyArray) -> Any:
        """What each of `num` networks draws by itself, such as masks; `None` for nothing."""
        return None

    def network(self, problem: Problem, unknowns: Unknowns) -> Any:
        """The network with these unknowns, a function of one input."""
        return problem.target.model(unknowns)

    def outputs(
        self, problem: Problem, found: Any, draws: Unknowns, x: Any, key: PRNGKeyArray
    ) -> Shaped[Array, "S B ..."]:
        """What the networks return for `B` inputs.

        **Arguments:**

        - `draws`: unknowns with a leading axis of `S` draws.
        - `x`: inputs with a leading axis of `B` examples.
        """

        def of_one(unknowns: Unknowns) -> Any:
            return jax.vmap(self.network(problem, unknowns))(x)

        return jax.vmap(of_one)(draws)

    def log_evidence(self, problem: Problem, found: Any) -> Float[Array, ""] | None:
        """The log of the density of the data, in nats; `None` where the method has none."""
        return None

    def diagnosed(self, problem: Problem, found: Any) -> dict[str, Any]:
        """Fields of `bayes.Diagnostics` that what was found says itself, by name."""
        return {}


def with_plain_numbers(method: Method) -> Method:
    """A method whose settings are numbers of Python where they were NumPy's: those are arrays to
    `jax.jit`, and sizes may not be.
    """
    return jtu.tree_map(lambda leaf: leaf.item() if isinstance(leaf, np.generic) else leaf, method)


def chosen(draws: Float[Array, "n d"], num: int, key: PRNGKeyArray) -> Float[Array, "S d"]:
    """`S = num` of `n` draws, each as often as the others, or once more.

    Those that come once more are picked at random.
    """
    size = draws.shape[0]
    order = jr.permutation(key, size)
    indices = jnp.concatenate([jnp.tile(order, num // size), order[: num % size]])
    return draws[jnp.sort(indices)]
