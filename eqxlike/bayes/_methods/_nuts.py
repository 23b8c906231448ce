"""The No-U-Turn Sampler."""

from typing import Any

from jaxtyping import Array, PRNGKeyArray

from ..._numbers import whole_number
from .._blackjax import blackjax
from ._hamiltonian import Hamiltonian


class NUTS(Hamiltonian):
    """The No-U-Turn Sampler: Hamiltonian Monte Carlo that ends a trajectory where it turns back.

    It is exact but for Monte Carlo error, and the reference for networks of up to some thousand
    unknowns (Hoffman and Gelman, 2014, "The No-U-Turn Sampler"; BlackJAX's implementation).

    - `num_samples`: draws that each chain keeps.
    - `num_warmup`: steps before that, in which step size and mass matrix are adapted.
    - `chains`: how many there are.
    - `thin`: of how many steps one is kept.
    - `target_acceptance`: the acceptance rate that the step size is chosen for. The nearer to 1,
      the smaller the steps.
    - `dense_mass`: whether the mass matrix has correlations: slower steps, of which fewer are
      needed.
    - `step_size`: with which warm-up begins. With `num_warmup=0` nothing is adapted: it is that of
      all steps, in the unit of unknowns in linked space, and the mass matrix is the identity;
      choose it so that `diagnostics.acceptance` lies near `target_acceptance`.
    - `max_doublings`: a trajectory has at most `2**max_doublings - 1` steps.

    >>> from eqxlike import bayes
    >>> method = bayes.NUTS(num_samples=500, target_acceptance=0.9)
    """

    max_doublings: int = 10

    def __check_init__(self):
        whole_number(self.max_doublings, "NUTS: max_doublings")

    def move(
        self, key: PRNGKeyArray, chain: Any, log_density: Any, step_size: Array, inverse_mass: Array
    ) -> tuple[Any, Any]:
        kernel = blackjax().mcmc.nuts.build_kernel()
        return kernel(key, chain, log_density, step_size, inverse_mass, self.max_doublings)
