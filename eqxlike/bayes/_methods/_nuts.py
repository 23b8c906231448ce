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

    - `max_doublings`: a trajectory has at most `2**max_doublings - 1` steps.

    The other fields are those of `bayes.HMC`.

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
