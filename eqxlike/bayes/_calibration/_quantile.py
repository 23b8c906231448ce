"""The quantile of calibration scores that makes split conformal prediction cover."""

import math
from fractions import Fraction

import jax.numpy as jnp
from jaxtyping import Array, Float

from ..._numbers import real_number


def conformal_quantile(scores: Float[Array, " N"], level: float, name: str) -> Float[Array, ""]:
    """The `ceil((N + 1) level)`-th smallest of the scores.

    The score of one more exchangeable example is at most that with probability of at least `level`,
    and without ties of at most `level + 1 / (N + 1)`.

    **Raises:** `ValueError` unless `0 < level < 1`, or if N is too small for the level.
    """
    exact = _as_written(level)
    size = len(scores)
    rank = math.ceil((size + 1) * exact)
    if rank > size:
        raise ValueError(
            f"{name} expects at least {math.ceil(exact / (1 - exact))} calibration examples for "
            f"level {level}, got {size}."
        )
    return jnp.sort(scores)[rank - 1]


def _as_written(level: float) -> Fraction:
    """The decimal that was meant: as a float, 0.55 times 20 is above 11."""
    number = real_number(level, "level")
    if not 0 < number < 1:
        raise ValueError(f"level must lie in (0, 1), got {level!r}.")
    return Fraction(repr(number))
