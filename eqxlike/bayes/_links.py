"""Links: bijections from unconstrained numbers to the support of a distribution.

A density of `x` becomes one of `u`, where `x = t(u)`, by the factor `|det dx/du|`.
"""

from typing import Any

from jaxtyping import Array, Float

from ._library_rules import as_libraries_compute
from ._numpyro import distributions


def constrained(distribution: Any, unconstrained: Array) -> Array:
    """`x = t(u)`, a value in the support of the distribution."""
    with as_libraries_compute():
        return _link_of(distribution)(unconstrained)


def unconstrained(distribution: Any, value: Array) -> Array:
    """`u`, with `t(u) = x`: the inverse of `constrained`."""
    with as_libraries_compute():
        return _link_of(distribution).inv(value)


def log_det_jacobian(distribution: Any, unconstrained: Array) -> Float[Array, ""]:
    """`log |det dx/du|`, summed over all values."""
    link = _link_of(distribution)
    with as_libraries_compute():
        return link.log_abs_det_jacobian(unconstrained, link(unconstrained)).sum()


def _link_of(distribution: Any) -> Any:
    return distributions().biject_to(distribution.support)
