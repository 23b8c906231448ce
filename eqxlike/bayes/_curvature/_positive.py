"""Precisions that are none are made so: curvature counts, whichever way it goes.

A normal distribution has a precision with positive eigenvalues. One that is negative is taken with
the other sign, so that the width in its direction is that on which the density changes; one that is
zero to rounding, as the smallest that is not (Dauphin et al., 2014, "Identifying and Attacking the
Saddle Point Problem in High-Dimensional Non-Convex Optimization"; Betancourt, 2013, "A General
Metric for Riemannian Manifold Hamiltonian Monte Carlo").
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


def positive(values: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """Eigenvalues that are positive."""
    magnitudes = jnp.abs(values)
    rounding = jnp.finfo(values.dtype).eps * values.size
    return jnp.maximum(magnitudes, rounding * jnp.max(magnitudes))


def positive_cholesky(matrix: Float[Array, "k k"]) -> Float[Array, "k k"]:
    """The Cholesky factor of a symmetric matrix with its eigenvalues made positive."""
    matrix = (matrix + matrix.T) / 2
    factor = jnp.linalg.cholesky(matrix)

    def by_eigenvalues() -> Array:
        values, vectors = jnp.linalg.eigh(matrix)
        upper = jnp.linalg.qr(jnp.sqrt(positive(values))[:, None] * vectors.T, mode="r")
        return upper.T * jnp.where(jnp.diagonal(upper) < 0, -1, 1).astype(upper.dtype)[None, :]

    # Eigenvalues take thirty times as long: 4 s and 0.13 s for 2000 unknowns on two cores.
    return jax.lax.cond(jnp.all(jnp.isfinite(factor)), lambda: factor, by_eigenvalues)
