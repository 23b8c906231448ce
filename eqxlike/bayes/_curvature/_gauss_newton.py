"""The generalised Gauss-Newton matrix of the likelihood, as sums over examples.

It is `sum_n J_n^T L_n J_n`, with `J_n` the Jacobian of the outputs for an example and `L_n` the
Hessian of minus its log density in the outputs: the Hessian but for the curvature of the network
(Schraudolph, 2002, "Fast Curvature Matrix-Vector Products for Second-Order Gradient Descent").
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
from jaxtyping import Array, Float

from ._around import AroundMode, block_size

Rows = Float[Array, "r k"]


def sum_over_rows(
    around: AroundMode, of_rows: Callable[[Rows], Any]
) -> tuple[Any, Float[Array, "k m"]]:
    """Goes through the data in blocks, so that memory does not grow with their number.

    **Arguments:**

    - `of_rows`: what is to be summed: a function of some rows `R_n J_n`, where `R_n^T R_n = L_n`.
      The matrix is the sum of their outer products.

    **Returns:** the sum, and the exact second derivatives of minus the log likelihood by all
    unknowns and the `m` of the likelihood itself.
    """
    data, num = around.problem.target.data, around.problem.target.num_data
    place = around.place("likelihood")
    own = around.centre[place]

    def of_example(x: Any, y: Any) -> tuple[Array, Array, Array]:
        jacobian, output = around.jacobian(x)
        hessian = _hessian(around, jnp.concatenate([output, own]), y)
        size = output.shape[0]
        columns = jacobian.T @ hessian[:size, size:]
        columns = columns.at[place].add(hessian[size:, size:])
        return _root(hessian[:size, :size]) @ jacobian, columns, output

    def of_block(first: Array) -> tuple[Any, Array]:
        index = first + jnp.arange(size)
        is_counted = (index < num).astype(around.mode.dtype)
        block = jtu.tree_map(lambda leaf: leaf[jnp.minimum(index, num - 1)], data)
        rows, columns, _ = jax.vmap(of_example)(*block)
        rows = (rows * is_counted[:, None, None]).reshape(-1, rows.shape[-1])
        return of_rows(rows), jnp.einsum("b,bkm->km", is_counted, columns)

    one = jtu.tree_map(lambda leaf: leaf[0], data)
    rows, columns, _ = jax.eval_shape(of_example, *one)
    size = block_size(rows.dtype.itemsize * (2 * rows.size + columns.size), num)
    zero = jtu.tree_map(
        lambda struct: jnp.zeros(struct.shape, struct.dtype),
        jax.eval_shape(of_block, jnp.asarray(0)),
    )
    starts = size * jnp.arange(math.ceil(num / size))
    return jax.lax.scan(lambda total, first: (_sum(total, of_block(first)), None), zero, starts)[0]


def _sum(total: Any, other: Any) -> Any:
    return jtu.tree_map(jnp.add, total, other)


def _hessian(around: AroundMode, outputs_and_own: Array, y: Any) -> Float[Array, "c c"]:
    """That of minus the log density of one example in outputs and unknowns of the likelihood."""
    target, place = around.problem.target, around.place("likelihood")
    struct = around.output

    def negative_log_prob(values: Array) -> Array:
        output = values[: struct.size].reshape(struct.shape).astype(struct.dtype)
        varying = around.centre.at[place].set(values[struct.size :])
        own = around.problem.unknowns(around.vector(varying)).likelihood
        return -target.likelihood.log_prob(output, own, y).astype(values.dtype)

    return jax.hessian(negative_log_prob)(outputs_and_own)


def _root(hessian: Float[Array, "C C"]) -> Float[Array, "C C"]:
    """`R` with `R^T R` the matrix without its negative eigenvalues."""
    if hessian.shape == (1, 1):
        return jnp.sqrt(jnp.maximum(hessian, 0))
    values, vectors = jnp.linalg.eigh(hessian)
    return jnp.sqrt(jnp.maximum(values, 0))[:, None] * vectors.T
