"""The curvature of all unknowns that vary, with all correlations."""

import jax.numpy as jnp
from jax.scipy.linalg import solve_triangular
from jaxtyping import Array, Float

from ..._module import field
from ._around import AroundMode
from ._gauss_newton import sum_over_rows
from ._parts import Part
from ._positive import positive_cholesky
from ._prior_hessian import prior_hessian
from ._structure import Curvature, Normal


class DenseNormal(Normal):
    """- `factor`: the Cholesky factor `L` of the precision `L L^T`."""

    factor: Float[Array, "k k"]

    @property
    def log_det_precision(self) -> Float[Array, ""]:
        return 2 * jnp.sum(jnp.log(jnp.diagonal(self.factor)))

    def scaled(self, noise: Float[Array, "S k"]) -> Float[Array, "S k"]:
        return solve_triangular(self.factor, noise.T, lower=True, trans="T").T

    def whitened(self, rows: Float[Array, "r k"]) -> Float[Array, "r k"]:
        return solve_triangular(self.factor, rows.T, lower=True).T


class DenseCurvature(Curvature):
    """- `matrix`: the Hessian, the parameters of the model first."""

    matrix: Float[Array, "k k"]
    num_parameters: int = field(static=True)

    def likelihood_eigenvalues(self, prior_precision: Float[Array, ""]) -> Float[Array, " p"]:
        # With all unknowns beside the parameters integrated out: a Schur complement.
        p = self.num_parameters
        own = self.matrix[:p, :p]
        if p < self.matrix.shape[0]:
            others = DenseNormal(positive_cholesky(self.matrix[p:, p:]))
            mixed = others.whitened(self.matrix[:p, p:])
            own = own - mixed @ mixed.T
        return jnp.linalg.eigvalsh(own) - prior_precision

    def normal(self, added: Float[Array, ""]) -> DenseNormal:
        p = jnp.arange(self.num_parameters)
        return DenseNormal(positive_cholesky(self.matrix.at[p, p].add(added)))


def dense_curvature(around: AroundMode) -> DenseCurvature:
    """That of the unknowns that vary.

    It is exact for the unknowns of prior and likelihood, and for a network that is linear in its
    parameters.
    """
    matrix, columns = sum_over_rows(around, lambda rows: rows.T @ rows)
    own = around.place("likelihood")
    matrix = matrix.at[:, own].set(columns).at[own, :].set(columns.T)
    everything = slice(0, matrix.shape[0])
    parameters = around.place("model")
    return DenseCurvature(matrix + prior_hessian(around, everything), parameters.stop)


def dense_size(parts: tuple[Part, ...]) -> int:
    """How many numbers it has."""
    return sum(part.size for part in parts) ** 2
