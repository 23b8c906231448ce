"""Two classes."""

from collections.abc import Mapping
from typing import Any

from jaxtyping import Array

from .._numpyro import distributions
from ._likelihood import Likelihood, Struct, check_counts, check_output, check_range


class Bernoulli(Likelihood):
    """Targets 0 and 1. The network returns the logit of 1, of shape `()`."""

    def distribution(self, output: Any, unknowns: Mapping[str, Any]) -> Any:
        return distributions().Bernoulli(logits=output)

    def check(self, output: Any, y: Struct) -> None:
        check_output("Bernoulli", output, (), "(), the logit of 1")
        check_counts("Bernoulli", y, "0 or 1")

    def check_values(self, output: Any, y: Array) -> None:
        check_range("Bernoulli", y, 1, "the two classes")
