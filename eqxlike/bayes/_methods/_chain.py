"""What the methods have in common whose draws are the places that a Markov chain visits."""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

from ..._numbers import whole_number
from .._inference import Method, Problem, Record, State, chosen


class MarkovChain(Method):
    """Several chains, each with `num_warmup` steps before its first draw.

    A step returns its place as the record `draw`.
    """

    num_samples: int = 1000
    num_warmup: int = 1000
    chains: int = 4
    thin: int = 1

    def __check_init__(self):
        name = type(self).__name__
        whole_number(self.num_samples, f"{name}: num_samples")
        whole_number(self.num_warmup, f"{name}: num_warmup", least=0)
        whole_number(self.chains, f"{name}: chains")
        whole_number(self.thin, f"{name}: thin")

    @property
    def num_chains(self) -> int:
        return self.chains

    @property
    def num_steps(self) -> int:
        return self.num_warmup + self.num_samples * self.thin

    @property
    def num_dropped(self) -> int:
        return self.num_warmup

    @property
    def thinning(self) -> int:
        return self.thin

    def finish(
        self, problem: Problem, states: State, records: Record, key: PRNGKeyArray
    ) -> Float[Array, "n d"]:
        draws = records["draw"]
        return draws.reshape(-1, draws.shape[-1])

    def sample(
        self, problem: Problem, found: Any, num: int, key: PRNGKeyArray
    ) -> Float[Array, "S d"]:
        return chosen(jnp.asarray(found), num, key)

    def num_found(self, found: Array) -> int:
        return found.shape[0]
