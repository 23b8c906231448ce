"""The curvature of a log density at its mode: dense, diagonal, or Kronecker-factored."""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jax.scipy.linalg import solve_triangular
from jaxtyping import Array, Float

from ... import Module
from ._gauss_newton import (
    AroundMode,
    Part,
    prior_diagonal,
    prior_hessian,
    sum_over_features,
    sum_over_rows,
)

# --- Dense curvature, with all correlations ---


class DenseNormal(Module):
    """A normal distribution of `k` numbers with mean zero, stored as a root of its covariance.

    - `root`: triangular matrix `R`, with covariance `R^T R`. `R` is the inverse of the Cholesky
      factor of the precision, because products with `R` are faster than triangular solves with the
      factor.
    """

    root: Float[Array, "k k"]

    @property
    def log_det_precision(self) -> Float[Array, ""]:
        return -2 * jnp.sum(jnp.log(jnp.diagonal(self.root)))

    def draw(self, noise: Float[Array, "S k"]) -> Float[Array, "S k"]:
        """Transforms standard normal noise into draws."""
        return noise @ self.root

    def covariance_of(self, rows: Float[Array, "r k"]) -> Float[Array, "r r"]:
        """The covariance `J P^-1 J^T` of `J` times a draw. `rows` has the rows of `J`."""
        columns = self.root @ rows.T
        return columns.T @ columns

    def times(self, width: Float[Array, ""]) -> "DenseNormal":
        """The distribution with its covariance multiplied by `width`."""
        return DenseNormal(self.root * jnp.sqrt(width))


def dense_curvature(around: AroundMode) -> Float[Array, "k k"]:
    """The Hessian of the negative log density for all varying unknowns. It may be indefinite.

    The Hessian is exact for the unknowns of prior and likelihood, and for networks that are linear
    in their parameters. Otherwise it is the Gauss-Newton approximation.
    """

    def of_rows() -> Float[Array, "k k"]:
        matrix, columns = sum_over_rows(around, lambda rows: rows.T @ rows)
        own = around.place("likelihood")
        return matrix.at[:, own].set(columns).at[own, :].set(columns.T)

    if around.may_have_features:
        products, num_others = sum_over_features(around)
        order = np.argsort(around.places_by_output.reshape(-1))

        def of_features() -> Float[Array, "k k"]:
            size = len(order)
            return products.transpose(2, 0, 3, 1).reshape(size, size)[order][:, order]

        matrix = jax.lax.cond(num_others == 0, of_features, of_rows)
    else:
        matrix = of_rows()
    return matrix + prior_hessian(around, slice(0, matrix.shape[0]))


def dense_normal(around: AroundMode) -> DenseNormal:
    """The normal distribution whose precision is the Hessian, made positive definite."""
    matrix = dense_curvature(around)
    identity = jnp.eye(matrix.shape[0], dtype=matrix.dtype)
    return DenseNormal(solve_triangular(positive_cholesky(matrix), identity, lower=True))


# --- Block-diagonal curvature: one block per array, stored as eigenvectors and eigenvalues ---


class Block(Module):
    """The precision of the entries of one array. The array is reshaped to one axis per basis.

    With two bases `U` and `V` the precision is `(U x V) diag(values) (U x V)^T`, where `x` is the
    Kronecker product. Without a basis, the precision is diagonal.

    - `values`: the eigenvalues.
    - `bases`: orthogonal matrices with eigenvectors as columns.
    """

    values: Float[Array, "*shape"]
    bases: tuple[Float[Array, "n n"], ...]

    @property
    def root(self) -> Float[Array, "1 *shape"]:
        """The square roots of the eigenvalues."""
        return jnp.sqrt(self.values)[None]

    def diagonal_of(self, diagonal: Float[Array, " size"]) -> Float[Array, "*shape"]:
        """Transforms `diag(diagonal)` to the eigenbasis. Returns the diagonal of the result."""
        values = diagonal.reshape(self.values.shape)
        for axis, basis in enumerate(self.bases):
            values = jnp.moveaxis(jnp.tensordot(basis.T**2, values, (1, axis)), 0, axis)
        return values

    def rotated(self, numbers: Float[Array, "r size"], *, back: bool) -> Float[Array, "r *shape"]:
        """Transforms entries of the array to the eigenbasis, or back from it if `back=True`."""
        numbers = numbers.reshape(-1, *self.values.shape)
        for axis, basis in enumerate(self.bases, start=1):
            matrix = basis if back else basis.T
            numbers = jnp.moveaxis(jnp.tensordot(matrix, numbers, (1, axis)), 0, axis)
        return numbers


class RotatedNormal(Module):
    """A normal distribution of independent arrays. It has the same methods as `DenseNormal`.

    - `blocks`: the precision, in the order of the vector.
    """

    blocks: tuple[Block, ...]

    @property
    def log_det_precision(self) -> Float[Array, ""]:
        return jnp.sum(jnp.stack([jnp.sum(jnp.log(block.values)) for block in self.blocks]))

    def draw(self, noise: Float[Array, "S k"]) -> Float[Array, "S k"]:
        def of_one(block: Block, noise: Array) -> Array:
            return block.rotated(noise.reshape(-1, *block.values.shape) / block.root, back=True)

        return self._by_blocks(of_one, noise)

    def covariance_of(self, rows: Float[Array, "r k"]) -> Float[Array, "r r"]:
        rows = self._by_blocks(lambda block, own: block.rotated(own, back=False) / block.root, rows)
        return rows @ rows.T

    def times(self, width: Float[Array, ""]) -> "RotatedNormal":
        return self._with_values(lambda values: values / width)

    def positive(self) -> "RotatedNormal":
        """The precision made positive definite. The curvature at a mode may be indefinite."""
        return self._with_values(positive)

    def without(self, rows: Float[Array, "r k"]) -> "RotatedNormal":
        """Subtracts the outer products of rows from the precision.

        Only the diagonal of the outer products in the eigenbases is subtracted, so that the
        precision stays diagonal in the eigenbases.
        """
        blocks = []
        for block, own in self._split(rows):
            values = block.values - jnp.sum(block.rotated(own, back=False) ** 2, axis=0)
            blocks.append(Block(jnp.maximum(values, 1e-6 * block.values), block.bases))
        return RotatedNormal(tuple(blocks))

    def rotated(self, vector: Float[Array, " k"], *, back: bool) -> Float[Array, " k"]:
        """Transforms the vector to the eigenbases, or back from them if `back=True`."""
        return self._by_blocks(lambda block, own: block.rotated(own, back=back), vector[None])[0]

    def _with_values(self, function: Callable[[Array], Array]) -> "RotatedNormal":
        blocks = (Block(function(each.values), each.bases) for each in self.blocks)
        return RotatedNormal(tuple(blocks))

    def _by_blocks(
        self, of_one: Callable[[Block, Array], Array], rows: Float[Array, "r k"]
    ) -> Float[Array, "r k"]:
        results = [of_one(*pair).reshape(len(rows), -1) for pair in self._split(rows)]
        return jnp.concatenate(results, axis=1)

    def _split(self, rows: Float[Array, "r k"]) -> Iterator[tuple[Block, Any]]:
        """Each block, with the columns of `rows` that belong to it."""
        stops = np.cumsum([block.values.size for block in self.blocks])[:-1]
        return zip(self.blocks, jnp.split(rows, stops, axis=1), strict=True)


Normal = DenseNormal | RotatedNormal


def outputs_and_covariance(
    around: AroundMode, normal: Normal, x: Any
) -> tuple[Float[Array, " C"], Float[Array, "C C"]]:
    """The outputs of the linearised network for one input: mean and covariance."""
    if not (isinstance(normal, DenseNormal) and around.may_have_features):
        jacobian, outputs = around.jacobian(x)
        return outputs, normal.covariance_of(jacobian)
    features, outputs, is_whole = around.features(x)

    def of_features() -> Float[Array, "C C"]:
        own = jnp.split(features, np.cumsum([part.size // outputs.size for part in around.parts]))
        columns = [
            normal.root[:, around.place_of(part)].reshape(-1, outputs.size, each.size) @ each
            for part, each in zip(around.parts, own, strict=False)
        ]
        total = jnp.sum(jnp.stack(columns), axis=0)
        return total.T @ total

    def of_rows() -> Float[Array, "C C"]:
        return normal.covariance_of(around.jacobian(x)[0])

    return outputs, jax.lax.cond(is_whole, of_features, of_rows)


# --- Diagonal curvature ---


def diagonal_curvature(around: AroundMode) -> RotatedNormal:
    """The diagonal of the Hessian, which may have negative entries.

    The inverse of an entry is the variance of an unknown, conditional on all other unknowns.
    """
    diagonal, columns = sum_over_rows(around, lambda rows: jnp.sum(rows**2, axis=0))
    own = around.place("likelihood")
    diagonal = diagonal.at[own].set(jnp.diagonal(columns[own]))
    blocks = (
        Block(diagonal[around.place_of(part)] + prior_diagonal(around, part), ())
        for part in around.parts
    )
    return RotatedNormal(tuple(blocks))


# --- Kronecker-factored curvature ---
#
# Each array has a block. The block of a weight matrix is approximated in two steps. First, power
# iterations over the data find the Kronecker product nearest to this block of the Gauss-Newton
# matrix (Van Loan and Pitsianis, 1993, "Approximation with Kronecker Products"). The iterations use
# only Jacobians, so any type of layer is supported. The eigenvectors of the two Kronecker factors
# are two bases. Then the block is approximated by the best matrix that is diagonal in the product
# of these bases. This matrix is more accurate than any Kronecker product with these bases (George
# et al., 2018, "Fast Approximate Natural Gradient Descent in a Kronecker-Factored Eigenbasis"). The
# posterior is by Ritter, Botev and Barber (2018), "A Scalable Laplace Approximation for Neural
# Networks".


def kronecker_curvature(around: AroundMode, power_iterations: int = 6) -> RotatedNormal:
    """One block per array: Kronecker-factored for matrices, dense for other arrays.

    Eigenvalues may be negative.

    **Arguments:**

    - `power_iterations`: number of passes over the data that compute the bases. One pass gives the
      usual K-FAC factors.
    """
    bases = _bases(around, power_iterations)

    def of_rows(rows: Array) -> list[Array]:
        terms = []
        for part in around.parts:
            own = rows[:, around.place_of(part)]
            if part not in bases:
                terms.append(own.T @ own)
            else:
                left, right = bases[part]
                own = own.reshape(-1, left.shape[0], right.shape[0])
                rotated = jnp.einsum("ia,rij,jb->rab", left, own, right, optimize=True)
                terms.append(jnp.sum(rotated**2, axis=0))
        return terms

    sums, columns = sum_over_rows(around, of_rows)
    first = around.place("likelihood").start
    blocks = []
    for part, total in zip(around.parts, sums, strict=True):
        if part not in bases:
            place = around.place_of(part)
            if part.kind == "likelihood":
                total = columns[place, place.start - first : place.stop - first]
            values, vectors = jnp.linalg.eigh(total + prior_hessian(around, place))
            blocks.append(Block(values, (vectors,)))
        else:
            # If the prior precision varies within the array, the prior precision is not diagonal in
            # these bases. Only its diagonal is kept.
            prior = Block(total, bases[part]).diagonal_of(prior_diagonal(around, part))
            blocks.append(Block(total + prior, bases[part]))
    return RotatedNormal(tuple(blocks))


def _bases(around: AroundMode, power_iterations: int) -> dict[Part, tuple[Array, Array]]:
    """The eigenvectors of the two Kronecker factors of each matrix."""
    shapes = {part: shape for part in around.parts if (shape := _matrix_shape(part))}

    def of_rows(rows: Array, factors: Any) -> Any:
        products = []
        for (part, shape), (left, right) in zip(shapes.items(), factors, strict=True):
            own = rows[:, around.place_of(part)].reshape(-1, *shape)
            new_left = jnp.einsum("rab,bc,rdc->ad", own, right, own, optimize=True)
            new_right = jnp.einsum("rab,ad,rdc->bc", own, left, own, optimize=True)
            products.append((new_left, new_right))
        return products

    def iterate(_: Any, factors: Any) -> Any:
        sums, _ = sum_over_rows(around, lambda rows: of_rows(rows, factors))
        return jtu.tree_map(_normalised, sums)

    factors = [
        tuple(jnp.eye(size, dtype=around.mode.dtype) / size for size in shape)
        for shape in shapes.values()
    ]
    factors = jax.lax.fori_loop(0, power_iterations, iterate, factors)
    bases = jtu.tree_map(lambda factor: jnp.linalg.eigh(factor)[1], factors)
    return dict(zip(shapes, bases, strict=True))


def _normalised(factor: Float[Array, "n n"]) -> Float[Array, "n n"]:
    trace = jnp.trace(factor)
    return jnp.where(trace > 0, factor / jnp.where(trace > 0, trace, 1), factor)


def _matrix_shape(part: Part) -> tuple[int, int] | None:
    """The shape of a weight as a matrix (outputs, all other axes); `None` for other arrays."""
    if part.kind != "model" or len(part.struct.shape) < 2:
        return None
    return part.struct.shape[0], part.size // part.struct.shape[0]


def kronecker_size(parts: tuple[Part, ...]) -> int:
    """Number of entries that `kronecker_curvature` stores."""
    shapes = [_matrix_shape(part) or (part.size,) for part in parts]
    return sum(size**2 for shape in shapes for size in shape)


# --- Making a Hessian positive definite ---
#
# The sign of a negative eigenvalue is changed. The standard deviation in its direction is then the
# length over which the density changes. An eigenvalue that is zero up to rounding is raised to the
# rounding error (Dauphin et al., 2014, "Identifying and Attacking the Saddle Point Problem in
# High-Dimensional Non-Convex Optimization"; Betancourt, 2013, "A General Metric for Riemannian
# Manifold Hamiltonian Monte Carlo").


def positive(values: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """Makes eigenvalues positive."""
    magnitudes = jnp.abs(values)
    rounding = jnp.finfo(values.dtype).eps * values.size
    return jnp.maximum(magnitudes, rounding * jnp.max(magnitudes))


def positive_cholesky(matrix: Float[Array, "k k"]) -> Float[Array, "k k"]:
    """The Cholesky factor of a symmetric matrix after its eigenvalues are made positive."""
    matrix = (matrix + matrix.T) / 2
    factor = jnp.linalg.cholesky(matrix)

    def by_eigenvalues() -> Array:
        values, vectors = jnp.linalg.eigh(matrix)
        upper = jnp.linalg.qr(jnp.sqrt(positive(values))[:, None] * vectors.T, mode="r")
        return upper.T * jnp.where(jnp.diagonal(upper) < 0, -1, 1).astype(upper.dtype)[None, :]

    # Use eigenvalues only if the Cholesky factorisation fails. For 2,000 unknowns on two cores,
    # eigenvalues take 4 s and the factorisation 0.13 s.
    return jax.lax.cond(jnp.all(jnp.isfinite(factor)), lambda: factor, by_eigenvalues)
