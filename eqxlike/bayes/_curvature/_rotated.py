"""Curvatures without correlations between arrays, each given by eigenvectors and eigenvalues."""

import jax.numpy as jnp
from jaxtyping import Array, Float

from ..._module import Module, field
from ._positive import positive
from ._structure import Curvature, Normal


class Block(Module):
    """The precision of one array, seen as one with an axis for each of its bases.

    With bases `U` and `V` of two axes it is `(U x V) diag(values) (U x V)^T`, where `x` is the
    Kronecker product; without a basis it is diagonal.

    - `values`: the eigenvalues.
    - `bases`: orthogonal matrices, whose columns are eigenvectors.
    - `is_of_model`: whether these are parameters of the model.
    """

    values: Float[Array, "*shape"]
    bases: tuple[Float[Array, "n n"], ...]
    is_of_model: bool = field(static=True)

    def rotated(self, numbers: Float[Array, "r size"], *, back: bool) -> Float[Array, "r *shape"]:
        """Numbers of the array by eigenvectors, or `back`."""
        numbers = numbers.reshape(-1, *self.values.shape)
        for axis, basis in enumerate(self.bases, start=1):
            matrix = basis if back else basis.T
            numbers = jnp.moveaxis(jnp.tensordot(matrix, numbers, (1, axis)), 0, axis)
        return numbers


class RotatedNormal(Normal):
    """A normal distribution in which the arrays are independent."""

    blocks: tuple[Block, ...]

    @property
    def log_det_precision(self) -> Float[Array, ""]:
        return jnp.sum(jnp.stack([jnp.sum(jnp.log(block.values)) for block in self.blocks]))

    def scaled(self, noise: Float[Array, "S k"]) -> Float[Array, "S k"]:
        return self._by_blocks(
            noise,
            lambda block, each: block.rotated(
                _divided(each.reshape(-1, *block.values.shape), block), back=True
            ),
        )

    def whitened(self, rows: Float[Array, "r k"]) -> Float[Array, "r k"]:
        return self._by_blocks(
            rows, lambda block, each: _divided(block.rotated(each, back=False), block)
        )

    def _by_blocks(self, numbers: Float[Array, "r k"], of_one) -> Float[Array, "r k"]:
        found, start = [], 0
        for block in self.blocks:
            stop = start + block.values.size
            found.append(of_one(block, numbers[:, start:stop]).reshape(-1, block.values.size))
            start = stop
        return jnp.concatenate(found, axis=1)


def _divided(numbers: Float[Array, "r *shape"], block: Block) -> Float[Array, "r *shape"]:
    return numbers / jnp.sqrt(block.values)[None]


class RotatedCurvature(Curvature):
    """The blocks of the Hessian, with eigenvalues of any sign, in the order of the vector."""

    blocks: tuple[Block, ...]

    def likelihood_eigenvalues(self, prior_precision: Float[Array, ""]) -> Float[Array, " p"]:
        values = [block.values.reshape(-1) for block in self.blocks if block.is_of_model]
        return jnp.concatenate(values) - prior_precision

    def normal(self, added: Float[Array, ""]) -> RotatedNormal:
        return RotatedNormal(
            tuple(
                Block(
                    positive(block.values + added if block.is_of_model else block.values),
                    block.bases,
                    block.is_of_model,
                )
                for block in self.blocks
            )
        )
