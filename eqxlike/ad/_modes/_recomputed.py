"""Functions of arrays whose inside the pass back computes again."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from ..._compat import cpu_merges_recomputation
from ._mode import Arrays, OfArrays, Pullback
from ._reverse import Reverse
from ._rules import OfList, differentiated_by


def recomputed(function: OfList, policy: Callable[..., bool] | None) -> OfList:
    """`function`, of which the pass back keeps the arguments alone, and what `policy` says."""
    if policy is None and cpu_merges_recomputation():
        return differentiated_by(_InBranch(), function, None)
    return jax.checkpoint(function, policy=policy)


class _InBranch(Reverse):
    """Reverse mode that computes the function again in a branch of the pass back.

    XLA does not merge what is computed in a branch with what was computed before it, nor does it
    begin with the branch before the cotangents are there.
    """

    def vjp(self, function: OfArrays, arrays: Arrays) -> tuple[Arrays, Pullback, Arrays]:
        outputs, aux = function(arrays)

        def pull_back(cotangents: Arrays) -> Arrays:
            # Always true, which XLA does not know.
            is_taken = jax.lax.rng_uniform(jnp.float32(0), jnp.float32(1), ()) < 2
            return jax.lax.cond(
                is_taken,
                lambda arrays, cotangents: Reverse.vjp(self, function, arrays)[1](cotangents),
                lambda arrays, _: list(map(jnp.zeros_like, arrays)),
                arrays,
                cotangents,
            )

        return outputs, pull_back, aux
