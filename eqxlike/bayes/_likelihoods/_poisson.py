"""Counts."""

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array

from .._numpyro import distributions
from ._likelihood import Likelihood, Struct, check_counts, check_output, check_range


class Poisson(Likelihood):
    """Targets 0, 1, 2 and so on. The network returns the logarithm of the rate, of shape `()`."""

    def distribution(self, output: Any, unknowns: Mapping[str, Any]) -> Any:
        return distributions().Poisson(jnp.exp(output))

    def check(self, output: Any, y: Struct) -> None:
        check_output("Poisson", output, (), "(), the logarithm of the rate")
        check_counts("Poisson", y, "a count")

    def check_values(self, output: Any, y: Array) -> None:
        check_range("Poisson", y, None, "counts")
