"""Links: bijections from linked space, all numbers, to the support of a distribution.

A density of `x` becomes one of `u`, where `x = t(u)`, by the factor `|det dx/du|`.
"""

from typing import Any

from jaxtyping import Array, Float

from ._library_rules import as_libraries_compute
from ._numpyro import distributions


def constrained(distribution: Any, linked: Array) -> Array:
    """`x = t(u)`, a value in the support of the distribution."""
    with as_libraries_compute():
        return _link_of(distribution)(linked)


def unconstrained(distribution: Any, value: Array) -> Array:
    """`u`, with `t(u) = x`: the inverse of `constrained`."""
    with as_libraries_compute():
        return _link_of(distribution).inv(value)


def log_det_jacobian(distribution: Any, linked: Array) -> Float[Array, ""]:
    """`log |det dx/du|`, summed over all values."""
    link = _link_of(distribution)
    with as_libraries_compute():
        return link.log_abs_det_jacobian(linked, link(linked)).sum()


def is_free(distribution: Any) -> bool:
    """Whether both spaces are one: the link leaves its values as they are."""
    return isinstance(_link_of(distribution), distributions().transforms.IdentityTransform)


def is_normal(distribution: Any) -> bool:
    """Whether its values are independent normals, be it one distribution for many of them."""
    base = getattr(distribution, "base_dist", distribution)
    kinds = distributions()
    is_many = isinstance(distribution, kinds.ExpandedDistribution | kinds.Independent)
    return isinstance(base if is_many else distribution, kinds.Normal)


def _link_of(distribution: Any) -> Any:
    return distributions().biject_to(distribution.support)
