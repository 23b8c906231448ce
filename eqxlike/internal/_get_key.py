"""Random keys for tests."""

import dataclasses
import os
import random

import jax
from jaxtyping import Array


# Without `eq`, which would take its hash away: libraries make one a parameter of a cached function.
@dataclasses.dataclass(init=False, eq=False)
class GetKey:
    """A new random key at each call, for tests: what it starts from is random too.

    The environment variable `EQX_GETKEY_SEED` sets where it starts. A failing test shows the seed
    in the text of this object.

    **Arguments:**

    - `seed`: an integer to start from in place of a random one.

    >>> GetKey(3).seed
    3
    """

    seed: int
    call: int
    key: Array

    def __init__(self, seed: int | None = None):
        if seed is None:
            # Not the state of `random`, which a test may have set.
            drawn = random.SystemRandom().randrange(2**31)
            seed = int(os.environ.get("EQX_GETKEY_SEED", drawn))
        self.seed = seed
        self.call = 0
        self.key = jax.random.PRNGKey(seed)

    def __call__(self) -> Array:
        self.call += 1
        return jax.random.fold_in(self.key, self.call)
