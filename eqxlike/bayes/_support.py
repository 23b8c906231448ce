"""Checks of where a distribution lies."""

from typing import Any

import jax.numpy as jnp

from ._numpyro import check_distribution, distributions

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
