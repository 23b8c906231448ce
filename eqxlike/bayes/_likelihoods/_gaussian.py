"""Normal targets."""

from collections.abc import Mapping
from typing import Any

from .._numpyro import distributions
from ._likelihood import HasScale


class Gaussian(HasScale):
    """Targets that are normal around what the network returns.

    - `scale`: the standard deviation, in the unit of the targets: a number; a distribution of
      NumPyro over positive numbers, then it is an unknown too; or `"head"`: the network returns a
      centre and a scale (before softplus) for each target.
    """

    def distribution(self, output: Any, unknowns: Mapping[str, Any]) -> Any:
        return distributions().Normal(*self.loc_and_scale(output, unknowns))
