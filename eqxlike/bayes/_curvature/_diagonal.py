"""The diagonal of the curvature."""

import jax.numpy as jnp

from ._around import AroundMode
from ._gauss_newton import sum_over_rows
from ._parts import Part
from ._prior_hessian import prior_diagonal
from ._rotated import Block, RotatedCurvature


def diagonal_curvature(around: AroundMode) -> RotatedCurvature:
    """Second derivatives by each unknown alone: the variances that the others known would leave."""
    diagonal, columns = sum_over_rows(around, lambda rows: jnp.sum(rows**2, axis=0))
    own = around.place("likelihood")
    diagonal = diagonal.at[own].set(jnp.diagonal(columns[own]))
    return RotatedCurvature(
        tuple(
            Block(
                diagonal[around.offset(part)] + prior_diagonal(around, part),
                (),
                part.kind == "model",
            )
            for part in around.parts
        )
    )


def diagonal_size(parts: tuple[Part, ...]) -> int:
    """How many numbers it has."""
    return sum(part.size for part in parts)
