"""The scale of a normal prior that makes the data most probable."""

import math

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
from jaxtyping import Array, Float

from ._gauss_newton import AroundMode, Part, block_size

_MOST_FACTOR = 1e6


def best_prior_scale(
    eigenvalues: Float[Array, " k"],
    squared_distance: Float[Array, ""],
    num_parameters: int,
    scale: Float[Array, ""],
) -> Float[Array, ""]:
    """Maximises the log evidence of Laplace by the scale `s` of the prior, at a fixed mode.

    With `t = s**-2`, the derivative of the log evidence by `log t` is
    `(p - t q - sum_i t / (e_i + t)) / 2` (MacKay, 1992, "Bayesian Interpolation"). It only falls,
    so that bisection finds its root.

    **Arguments:**

    - `eigenvalues`: the `e_i`, those of the likelihood's curvature.
    - `squared_distance`: `q`, of the mode from the centre of the prior.
    - `num_parameters`: `p`, how many have the prior.
    - `scale`: what it was. The one found is at most a million times more or less.
    """
    eigenvalues = jnp.maximum(eigenvalues, 0)
    width = 2 * math.log(_MOST_FACTOR)

    def halve(_: int, ends: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = ends
        middle = (low + high) / 2
        precision = jnp.exp(middle)
        kept = jnp.sum(precision / (eigenvalues + precision))
        is_rising = num_parameters - precision * squared_distance - kept > 0
        return jnp.where(is_rising, middle, low), jnp.where(is_rising, high, middle)

    start = -2 * jnp.log(scale)
    num_halvings = jnp.finfo(start.dtype).nmant + 6
    low, high = jax.lax.fori_loop(0, num_halvings, halve, (start - width, start + width))
    return jnp.exp(-(low + high) / 4)


# --- Second derivatives of minus the log prior, that of the link included ---


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
