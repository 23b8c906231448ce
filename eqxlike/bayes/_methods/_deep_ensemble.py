"""Networks that are trained apart."""

from typing import Any

from jaxtyping import Array, Float, PRNGKeyArray

from ..._numbers import whole_number
from .._inference import Problem, chosen
from ._map import MAP


class DeepEnsemble(MAP):
    """Networks that are trained from different initial parameters, together in one batch.

    Their disagreement is the epistemic uncertainty (Lakshminarayanan, Pritzel and Blundell, 2017,
    "Simple and Scalable Predictive Uncertainty Estimation using Deep Ensembles").
    Each begins with the parameters of the model shuffled within each array, which for an
    initialiser that draws independent numbers is a draw of its own.

    - `members`: how many networks.

    The other fields are those of `bayes.MAP`.

    >>> from eqxlike import bayes
    >>> method = bayes.DeepEnsemble(members=10)
    """

    members: int = 5

    def __check_init__(self):
        whole_number(self.members, "DeepEnsemble: members")

    @property
    def num_chains(self) -> int:
        return self.members

    def first_place(self, problem: Problem, key: PRNGKeyArray) -> Float[Array, " d"]:
        return problem.redrawn(key)

    def sample(
        self, problem: Problem, found: Array, num: int, key: PRNGKeyArray
    ) -> Float[Array, "S d"]:
        return chosen(found, num, key)

    def num_found(self, found: Any) -> int:
        return self.members
