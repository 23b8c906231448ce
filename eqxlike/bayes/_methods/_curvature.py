"""The curvature of a log density at its mode: dense, diagonal, or by Kronecker products."""

from typing import Any, Protocol

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


class Normal(Protocol):
    """A normal distribution of `k` numbers with mean zero, given by its precision `P`.

    - `draw`: turns draws from the standard normal distribution into draws from this one.
    - `covariance_of`: `J P^-1 J^T`, the covariance of `J` times a draw, from the rows of `J`.
    - `times`: the distribution with the covariance times a number.
    """

    @property
    def log_det_precision(self) -> Float[Array, ""]: ...
    def draw(self, noise: Float[Array, "S k"]) -> Float[Array, "S k"]: ...
    def covariance_of(self, rows: Float[Array, "r k"]) -> Float[Array, "r r"]: ...
    def times(self, width: Float[Array, ""]) -> "Normal": ...


class Curvature(Protocol):
    """The Hessian of minus the log density, prior included. Its eigenvalues may have any sign.

    - `normal`: the normal distribution with the Hessian as its precision.
    """

    def normal(self) -> Normal: ...


# --- The curvature of all unknowns that vary, with all correlations ---


class DenseNormal(Module):
    """A normal distribution by a root of its covariance.

    - `root`: `R`, a triangular matrix, of the covariance `R^T R`. Its products are faster than
      solves with the Cholesky factor of the precision, which is its inverse.
    """

    root: Float[Array, "k k"]

    @property
    def log_det_precision(self) -> Float[Array, ""]:
        return -2 * jnp.sum(jnp.log(jnp.diagonal(self.root)))

    def draw(self, noise: Float[Array, "S k"]) -> Float[Array, "S k"]:
        return noise @ self.root

    def covariance_of(self, rows: Float[Array, "r k"]) -> Float[Array, "r r"]:
        columns = self.root @ rows.T
        return columns.T @ columns

    def times(self, width: Float[Array, ""]) -> "DenseNormal":
        return DenseNormal(self.root * jnp.sqrt(width))


class DenseCurvature(Module):
    """The Hessian, whole."""

    matrix: Float[Array, "k k"]

    def normal(self) -> DenseNormal:
        identity = jnp.eye(self.matrix.shape[0], dtype=self.matrix.dtype)
        return DenseNormal(solve_triangular(positive_cholesky(self.matrix), identity, lower=True))


def dense_curvature(around: AroundMode) -> DenseCurvature:
    """The curvature of all unknowns that vary.

    It is exact for the unknowns of prior and likelihood, and for a network that is linear in its
    parameters.
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
    return DenseCurvature(matrix + prior_hessian(around, slice(0, matrix.shape[0])))


def outputs_and_covariance(
    around: AroundMode, normal: Normal, x: Any
) -> tuple[Float[Array, " C"], Float[Array, "C C"]]:
    """The outputs for one input at the mode, and their covariance in the linearised network."""
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


def dense_size(parts: tuple[Part, ...]) -> int:
    """How many numbers `dense_curvature` keeps."""
    return sum(part.size for part in parts) ** 2


# Curvatures without correlations between arrays, each given by eigenvectors and eigenvalues.


class Block(Module):
    """The precision of one array, reshaped to have an axis for each of its bases.

    With bases `U` and `V` of two axes it is `(U x V) diag(values) (U x V)^T`, where `x` is the
    Kronecker product; without a basis it is diagonal.

    - `values`: the eigenvalues.
    - `bases`: orthogonal matrices, whose columns are eigenvectors.
    """

    values: Float[Array, "*shape"]
    bases: tuple[Float[Array, "n n"], ...]

    @property
    def root(self) -> Float[Array, "1 *shape"]:
        """The square roots of the eigenvalues."""
        return jnp.sqrt(self.values)[None]

    def diagonal_of(self, diagonal: Float[Array, " size"]) -> Float[Array, "*shape"]:
        """The diagonal in these bases of a matrix that is diagonal without them."""
        values = diagonal.reshape(self.values.shape)
        for axis, basis in enumerate(self.bases):
            values = jnp.moveaxis(jnp.tensordot(basis.T**2, values, (1, axis)), 0, axis)
        return values

    def rotated(self, numbers: Float[Array, "r size"], *, back: bool) -> Float[Array, "r *shape"]:
        """Numbers of the array as coefficients of eigenvectors; `back` is the inverse."""
        numbers = numbers.reshape(-1, *self.values.shape)
        for axis, basis in enumerate(self.bases, start=1):
            matrix = basis if back else basis.T
            numbers = jnp.moveaxis(jnp.tensordot(matrix, numbers, (1, axis)), 0, axis)
        return numbers


class RotatedNormal(Module):
    """A normal distribution in which the arrays are independent."""

    blocks: tuple[Block, ...]

    @property
    def log_det_precision(self) -> Float[Array, ""]:
        return jnp.sum(jnp.stack([jnp.sum(jnp.log(block.values)) for block in self.blocks]))

    def draw(self, noise: Float[Array, "S k"]) -> Float[Array, "S k"]:
        def of_one(block: Block, noise: Array) -> Array:
            return block.rotated(noise.reshape(-1, *block.values.shape) / block.root, back=True)

        return self._by_blocks(noise, of_one)

    def covariance_of(self, rows: Float[Array, "r k"]) -> Float[Array, "r r"]:
        rows = self._by_blocks(rows, lambda block, own: block.rotated(own, back=False) / block.root)
        return rows @ rows.T

    def times(self, width: Float[Array, ""]) -> "RotatedNormal":
        return RotatedNormal(tuple(Block(each.values / width, each.bases) for each in self.blocks))

    def without(self, rows: Float[Array, "r k"]) -> "RotatedNormal":
        """The distribution without some rows: their outer products leave the precision.

        As in the precision, only the diagonal of the products in the bases of the blocks counts.
        """
        squares = self._by_blocks(rows, lambda block, own: block.rotated(own, back=False) ** 2)
        sums, blocks, start = jnp.sum(squares, axis=0), [], 0
        for block in self.blocks:
            own = sums[start : start + block.values.size].reshape(block.values.shape)
            values = jnp.maximum(block.values - own, 1e-6 * block.values)
            blocks.append(Block(values, block.bases))
            start += block.values.size
        return RotatedNormal(tuple(blocks))

    def _by_blocks(self, numbers: Float[Array, "r k"], of_one) -> Float[Array, "r k"]:
        results, start = [], 0
        for block in self.blocks:
            stop = start + block.values.size
            results.append(of_one(block, numbers[:, start:stop]).reshape(-1, block.values.size))
            start = stop
        return jnp.concatenate(results, axis=1)


class RotatedCurvature(Module):
    """The blocks of the Hessian, with eigenvalues of any sign, in the order of the vector."""

    blocks: tuple[Block, ...]

    def normal(self) -> RotatedNormal:
        return RotatedNormal(
            tuple(Block(positive(each.values), each.bases) for each in self.blocks)
        )

    def rotated(self, numbers: Float[Array, " k"], *, back: bool) -> Float[Array, " k"]:
        """Numbers of all arrays as coefficients of eigenvectors; `back` is the inverse."""
        stops = np.cumsum([block.values.size for block in self.blocks])[:-1]
        own = zip(self.blocks, jnp.split(numbers, stops), strict=True)
        return jnp.concatenate(
            [block.rotated(each[None], back=back).reshape(-1) for block, each in own]
        )


# --- The diagonal of the curvature ---


def diagonal_curvature(around: AroundMode) -> RotatedCurvature:
    """Second derivatives by each unknown alone: their inverses are the variances given all other
    unknowns.
    """
    diagonal, columns = sum_over_rows(around, lambda rows: jnp.sum(rows**2, axis=0))
    own = around.place("likelihood")
    diagonal = diagonal.at[own].set(jnp.diagonal(columns[own]))
    blocks = []
    for part in around.parts:
        values = diagonal[around.place_of(part)] + prior_diagonal(around, part)
        blocks.append(Block(values, ()))
    return RotatedCurvature(tuple(blocks))


def diagonal_size(parts: tuple[Part, ...]) -> int:
    """How many numbers `diagonal_curvature` keeps."""
    return sum(part.size for part in parts)


# Curvatures of matrices as Kronecker products.
#
# A block is kept for each array. That of a matrix is diagonal in the product of two bases: the
# eigenvectors of the two factors of the nearest Kronecker product to its Gauss-Newton matrix (Van
# Loan and Pitsianis, 1993, "Approximation with Kronecker Products"), found by power iterations
# over the data from Jacobians alone, so that any layer will do. Its eigenvalues are then those
# that fit best in these bases, which brings it nearer than any Kronecker product of the bases
# (George et al., 2018, "Fast Approximate Natural Gradient Descent in a Kronecker-Factored
# Eigenbasis"). Ritter, Botev and Barber (2018), "A Scalable Laplace Approximation for Neural
# Networks", have the posterior.


_POWER_ITERATIONS = 6

Factors = tuple[Float[Array, "a a"], Float[Array, "b b"]]


def kronecker_curvature(
    around: AroundMode, power_iterations: int = _POWER_ITERATIONS
) -> RotatedCurvature:
    """A block for each array. One that is not a matrix has all correlations of its own.

    **Arguments:**

    - `power_iterations`: passes over the data for the bases. One makes the usual Kronecker factors.
    """
    bases = _bases(around, power_iterations)

    def of_rows(rows: Array) -> list[Array]:
        terms = []
        for part, basis in zip(around.parts, bases, strict=True):
            own = rows[:, around.place_of(part)]
            if basis is None:
                terms.append(own.T @ own)
            else:
                left, right = basis
                own = own.reshape(-1, left.shape[0], right.shape[0])
                rotated = jnp.einsum("ia,rij,jb->rab", left, own, right, optimize=True)
                terms.append(jnp.sum(rotated**2, axis=0))
        return terms

    sums, columns = sum_over_rows(around, of_rows)
    first = around.place("likelihood").start
    blocks = []
    for part, basis, total in zip(around.parts, bases, sums, strict=True):
        if basis is None:
            place = around.place_of(part)
            if part.kind == "likelihood":
                total = columns[place, place.start - first : place.stop - first]
            values, vectors = jnp.linalg.eigh(total + prior_hessian(around, place))
            blocks.append(Block(values, (vectors,)))
        else:
            # A prior whose precision differs within the array is not diagonal in these bases:
            # only its diagonal in them is kept.
            block = Block(total, basis)
            blocks.append(Block(total + block.diagonal_of(prior_diagonal(around, part)), basis))
    return RotatedCurvature(tuple(blocks))


def _bases(around: AroundMode, power_iterations: int) -> list[Factors | None]:
    """The eigenvectors of the two factors of each matrix, and `None` for other arrays."""
    shapes = [_matrix_shape(part) for part in around.parts]

    def of_rows(rows: Array, factors: Any) -> Any:
        products = []
        for part, shape, pair in zip(around.parts, shapes, factors, strict=True):
            if shape is None:
                products.append(None)
                continue
            own = rows[:, around.place_of(part)].reshape(-1, *shape)
            left, right = pair
            new_left = jnp.einsum("rab,bc,rdc->ad", own, right, own, optimize=True)
            new_right = jnp.einsum("rab,ad,rdc->bc", own, left, own, optimize=True)
            products.append((new_left, new_right))
        return products

    def iterate(_: Any, factors: Any) -> Any:
        sums, _ = sum_over_rows(around, lambda rows: of_rows(rows, factors))
        return jtu.tree_map(_normalised, sums)

    factors = [
        None
        if shape is None
        else tuple(jnp.eye(size, dtype=around.mode.dtype) / size for size in shape)
        for shape in shapes
    ]
    factors = jax.lax.fori_loop(0, power_iterations, iterate, factors)
    return jtu.tree_map(lambda factor: jnp.linalg.eigh(factor)[1], factors)


def _normalised(factor: Float[Array, "n n"]) -> Float[Array, "n n"]:
    trace = jnp.trace(factor)
    return jnp.where(trace > 0, factor / jnp.where(trace > 0, trace, 1), factor)


def _matrix_shape(part: Part) -> tuple[int, int] | None:
    """An array of the model as a matrix: the outputs of a layer, and the rest."""
    if part.kind != "model" or len(part.shape) < 2:
        return None
    return part.shape[0], part.size // part.shape[0]


def kronecker_size(parts: tuple[Part, ...]) -> int:
    """How many numbers `kronecker_curvature` keeps."""
    shapes = [_matrix_shape(part) or (part.size,) for part in parts]
    return sum(size**2 for shape in shapes for size in shape)


# A Hessian with eigenvalues that are not positive is not a precision, and is made one.
#
# A negative eigenvalue changes its sign: the width in its direction is then the length on which the
# density changes. One that is zero up to rounding becomes the smallest that is not (Dauphin et al.,
# 2014, "Identifying and Attacking the Saddle Point Problem in High-Dimensional Non-Convex
# Optimization"; Betancourt, 2013, "A General Metric for Riemannian Manifold Hamiltonian Monte
# Carlo").


def positive(values: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """Eigenvalues made positive."""
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
