"""Curvatures of matrices as Kronecker products.

A block is kept for each array. That of a matrix is diagonal in the product of two bases: the
eigenvectors of the two factors of the nearest Kronecker product to its Gauss-Newton matrix (Van
Loan and Pitsianis, 1993, "Approximation with Kronecker Products"), found by power iterations over
the data from Jacobians alone, so that any layer will do. Its eigenvalues are then those that fit
best in these bases, which brings it nearer than any Kronecker product of the bases (George et al.,
2018, "Fast Approximate Natural Gradient Descent in a Kronecker-Factored Eigenbasis"). Ritter,
Botev and Barber (2018), "A Scalable Laplace Approximation for Neural Networks", have the
posterior.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from ._around import AroundMode
from ._gauss_newton import sum_over_rows
from ._parts import Part
from ._prior_hessian import prior_diagonal, prior_hessian
from ._rotated import Block, RotatedCurvature

_POWER_ITERATIONS = 6

Factors = tuple[Float[Array, "a a"], Float[Array, "b b"]]


def kronecker_curvature(around: AroundMode) -> RotatedCurvature:
    """A block for each array. One that is no matrix has all correlations of its own."""
    bases = _bases(around)

    def of_rows(rows: Array) -> list[Array]:
        found = []
        for part, basis in zip(around.parts, bases, strict=True):
            own = rows[:, around.offset(part)]
            if basis is None:
                found.append(own.T @ own)
            else:
                left, right = basis
                own = own.reshape(-1, left.shape[0], right.shape[0])
                rotated = jnp.einsum("ia,rij,jb->rab", left, own, right, optimize=True)
                found.append(jnp.sum(rotated**2, axis=0))
        return found

    sums, columns = sum_over_rows(around, of_rows)
    first = around.place("likelihood").start
    blocks = []
    for part, basis, total in zip(around.parts, bases, sums, strict=True):
        if basis is None:
            place = around.offset(part)
            if part.kind == "likelihood":
                total = columns[place, place.start - first : place.stop - first]
            values, vectors = jnp.linalg.eigh(total + prior_hessian(around, place))
            blocks.append(Block(values, (vectors,), part.kind == "model"))
        else:
            # In other bases an uneven diagonal is no longer one: of it, too, the nearest is kept.
            left, right = basis
            prior = prior_diagonal(around, part).reshape(total.shape)
            blocks.append(Block(total + (left**2).T @ prior @ right**2, basis, True))
    return RotatedCurvature(tuple(blocks))


def _bases(around: AroundMode) -> list[Factors | None]:
    """The eigenvectors of the two factors of each matrix, and `None` for other arrays."""
    shapes = [_matrix_shape(part) for part in around.parts]

    def of_rows(rows: Array, factors: Any) -> Any:
        found = []
        for part, shape, pair in zip(around.parts, shapes, factors, strict=True):
            if shape is None:
                found.append(None)
                continue
            own = rows[:, around.offset(part)].reshape(-1, *shape)
            left, right = pair
            found.append(
                (
                    jnp.einsum("rab,bc,rdc->ad", own, right, own, optimize=True),
                    jnp.einsum("rab,ad,rdc->bc", own, left, own, optimize=True),
                )
            )
        return found

    def iterate(_: Any, factors: Any) -> Any:
        sums, _ = sum_over_rows(around, lambda rows: of_rows(rows, factors))
        return jax.tree_util.tree_map(_normalised, sums)

    factors = [
        None
        if shape is None
        else tuple(jnp.eye(size, dtype=around.mode.dtype) / size for size in shape)
        for shape in shapes
    ]
    factors = jax.lax.fori_loop(0, _POWER_ITERATIONS, iterate, factors)
    return jax.tree_util.tree_map(lambda factor: jnp.linalg.eigh(factor)[1], factors)


def _normalised(factor: Float[Array, "n n"]) -> Float[Array, "n n"]:
    trace = jnp.trace(factor)
    return jnp.where(trace > 0, factor / jnp.where(trace > 0, trace, 1), factor)


def _matrix_shape(part: Part) -> tuple[int, int] | None:
    """An array of the model as a matrix: the outputs of a layer, and the rest."""
    if part.kind != "model" or len(part.shape) < 2:
        return None
    return part.shape[0], part.size // part.shape[0]


def kronecker_size(parts: tuple[Part, ...]) -> int:
    """How many numbers it has."""
    shapes = [_matrix_shape(part) or (part.size,) for part in parts]
    return sum(size**2 for shape in shapes for size in shape)
