"""Links: bijections from linked space, all numbers, to the support of a distribution.

A density of `x` becomes one of `u`, where `x = t(u)`, by the factor `|det dx/du|`.
"""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from ._library_rules import as_libraries_compute
from ._numpyro import check_distribution, distributions


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


# --- Checks of where a distribution lies ---


# Numbers in linked space as far out as float32 tells their images apart.
_PROBES = (-8.0, 0.0, 8.0)


def check_positive(distribution: Any, name: str) -> None:
    """Raises `ValueError` unless the draws of a distribution are positive numbers."""
    check_distribution(distribution, name)
    check_continuous(distribution, name)
    check_scalar(distribution, name)
    link = distributions().biject_to(distribution.support)
    if not all(bool(link(jnp.array(probe)) > 0) for probe in _PROBES):
        raise ValueError(
            f"{name} is a scale, and must be a distribution over positive numbers, such as "
            f"`Gamma(2.0, 1.0)`; the support of {type(distribution).__name__} is "
            f"{distribution.support}."
        )


def check_scalar(distribution: Any, name: str) -> None:
    """Raises `ValueError` unless a draw is one number."""
    shape = distribution.batch_shape + distribution.event_shape
    if shape != ():
        raise ValueError(f"{name} must be a distribution over one number, got shape {shape}.")


def check_continuous(distribution: Any, name: str) -> None:
    """Raises `ValueError` for a distribution whose draws no link takes to linked space."""
    try:
        distributions().biject_to(distribution.support)
    except NotImplementedError:
        raise ValueError(
            f"{name} must have a density over real numbers; the support of "
            f"{type(distribution).__name__} is {distribution.support}."
        ) from None


def check_proper(distribution: Any, name: str) -> None:
    """Raises `ValueError` for a density that has no integral."""
    improper = distributions().ImproperUniform
    base = getattr(distribution, "base_dist", distribution)
    if isinstance(distribution, improper) or isinstance(base, improper):
        raise ValueError(
            f"{name} is improper: ImproperUniform has no integral, and with it the posterior may "
            "have none. Take a wide `Normal` instead."
        )
