"""Targets with outliers."""

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp

from ..._numbers import check_scale
from .._numpyro import distributions, is_distribution
from .._support import check_positive
from ._likelihood import HasScale


class StudentT(HasScale):
    """Targets around what the network returns, with heavy tails.

    - `scale`: as for `Gaussian`, but it is no standard deviation, which is larger, or infinite for
      2 degrees of freedom or fewer. With `"head"` the network returns all centres, then all scales.
    - `degrees_of_freedom`: a number, or a distribution of NumPyro over positive numbers. The fewer,
      the heavier the tails.
    """

    degrees_of_freedom: Any = 4.0

    def __check_init__(self):
        value, name = self.degrees_of_freedom, "StudentT: degrees_of_freedom"
        if is_distribution(value):
            check_positive(value, name)
        else:
            check_scale(value, name)

    def unknowns(self) -> dict[str, Any]:
        own = self.degrees_of_freedom
        return super().unknowns() | ({"degrees_of_freedom": own} if is_distribution(own) else {})

    def distribution(self, output: Any, unknowns: Mapping[str, Any]) -> Any:
        loc, scale = self.loc_and_scale(output, unknowns)
        degrees_of_freedom = unknowns.get("degrees_of_freedom", self.degrees_of_freedom)
        return distributions().StudentT(jnp.asarray(degrees_of_freedom, loc.dtype), loc, scale)
