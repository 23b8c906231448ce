"""The scale of a normal prior that makes the data most probable."""

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

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
