"""Second derivatives of minus the log prior, that of the link included."""

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
from jaxtyping import Array, Float

from ._around import AroundMode, block_size
from ._parts import Part


def prior_hessian(around: AroundMode, place: slice) -> Float[Array, "n n"]:
    """The Hessian by the unknowns of one place among those that vary."""
    size = around.centre.shape[0]

    def column(index: Array) -> Array:
        return _product(around, jax.nn.one_hot(index, size, dtype=around.mode.dtype))[place]

    batch_size = block_size(4 * around.mode.nbytes, place.stop - place.start)
    return jax.lax.map(column, jnp.arange(place.start, place.stop), batch_size=batch_size)


def prior_diagonal(around: AroundMode, part: Part) -> Float[Array, " n"]:
    """The diagonal of the Hessian by the unknowns of one array."""
    place = around.offset(part)
    if not _is_elementwise(around, part):
        return jnp.diagonal(prior_hessian(around, place))
    return _product(around, jnp.zeros_like(around.centre).at[place].set(1))[place]


def _product(around: AroundMode, vector: Float[Array, " k"]) -> Float[Array, " k"]:
    gradient = jax.grad(around.negative_log_prior)
    return jax.jvp(gradient, (around.centre,), (vector,))[1]


def _is_elementwise(around: AroundMode, part: Part) -> bool:
    """Whether the prior takes the numbers of an array as independent: its block is diagonal."""
    if part.kind != "model":
        return part.size == 1
    unknowns = around.problem.unknowns(around.mode)
    leaves = {
        jtu.keystr(path).removeprefix("."): jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
        for path, leaf in jtu.tree_leaves_with_path(unknowns.model)
    }
    prior = around.problem.target.prior
    return prior.of_leaf(part.path, leaves[part.path], unknowns.prior).event_shape == ()
