"""Normal targets."""

from collections.abc import Mapping
from typing import Any

from .._numpyro import distributions
from ._likelihood import HasScale


class Gaussian(HasScale):
    """Targets that are normal around what the network returns.

    - `scale`: the standard deviation, in the unit of the targets: a number; a distribution of
      NumPyro over positive numbers, then it is an unknown too; or `"head"`: the network returns it.

    With a head the network returns `2 * k` numbers for the k targets of an example: all centres
    first, then all scales, before softplus; a target of shape `()` has one of each.

    >>> import jax.numpy as jnp
    >>> output = jnp.array([10.0, 20.0, 0.0, 1.0])  # for targets of shape (2,)
    >>> target = Gaussian(scale="head").distribution(output, {})
    >>> target.loc.tolist(), [round(scale, 2) for scale in target.scale.tolist()]
    ([10.0, 20.0], [0.69, 1.31])
    """

    def distribution(self, output: Any, unknowns: Mapping[str, Any]) -> Any:
        return distributions().Normal(*self.loc_and_scale(output, unknowns))
