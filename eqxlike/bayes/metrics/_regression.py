"""Measures of predictions of numbers. `N` is the number of examples."""

import jax.numpy as jnp
from jaxtyping import Array, Float

from ._checks import check_same_shape


def rmse(y: Float[Array, "*N"], prediction: Float[Array, "*N"]) -> Float[Array, ""]:
    """The root mean squared error, `sqrt(mean((y - prediction)^2))`.

    **Arguments:**

    - `y`, `prediction`: arrays of one shape, in one unit.

    **Returns:** shape `()`, in the unit of `y`.

    **Raises:** `ValueError` if the shapes differ.

    >>> import jax.numpy as jnp
    >>> float(rmse(jnp.array([1.0, 2.0]), jnp.array([3.0, 4.0])))
    2.0
    """
    check_same_shape(y=y, prediction=prediction)
    return jnp.sqrt(jnp.mean((jnp.asarray(y) - jnp.asarray(prediction)) ** 2))


def coverage(
    y: Float[Array, "*N"], lower: Float[Array, "*N"], upper: Float[Array, "*N"]
) -> Float[Array, ""]:
    """The fraction of `y` within `[lower, upper]`.

    **Arguments:**

    - `y`, `lower`, `upper`: arrays of one shape, in one unit.

    **Returns:** shape `()`, between 0 and 1.

    **Raises:** `ValueError` if the shapes differ.

    >>> import jax.numpy as jnp
    >>> y = jnp.array([1.0, 2.0, 3.0, 4.0])
    >>> float(coverage(y, jnp.zeros(4), jnp.full(4, 3.0)))
    0.75
    """
    check_same_shape(y=y, lower=lower, upper=upper)
    y, lower, upper = jnp.asarray(y), jnp.asarray(lower), jnp.asarray(upper)
    return jnp.mean((lower <= y) & (y <= upper), dtype=y.dtype)


def sharpness(lower: Float[Array, "*N"], upper: Float[Array, "*N"]) -> Float[Array, ""]:
    """The mean width of the intervals `[lower, upper]`: of two that cover, the sharper is better.

    **Arguments:**

    - `lower`, `upper`: arrays of one shape, in one unit.

    **Returns:** shape `()`, in their unit.

    **Raises:** `ValueError` if the shapes differ.

    >>> import jax.numpy as jnp
    >>> float(sharpness(jnp.zeros(2), jnp.array([1.0, 3.0])))
    2.0
    """
    check_same_shape(lower=lower, upper=upper)
    return jnp.mean(jnp.asarray(upper) - jnp.asarray(lower))


def crps(y: Float[Array, "*N"], draws: Float[Array, "S *N"]) -> Float[Array, ""]:
    """The continuous ranked probability score, `E|X - y| - E|X - X'| / 2`, from `S` draws of X.

    It is proper, and of a point prediction the absolute error (Gneiting and Raftery, 2007,
    "Strictly Proper Scoring Rules, Prediction, and Estimation").

    **Arguments:**

    - `y`: shape `(*N)`.
    - `draws`: from the predictive distributions, shape `(S, *N)`, in the unit of `y`.

    **Returns:** the mean over the examples, shape `()`, in the unit of `y`; lower is better.

    **Raises:** `ValueError` if the shapes do not fit.

    >>> import jax.numpy as jnp
    >>> float(crps(jnp.array([1.0]), jnp.array([[3.0]])))
    2.0
    """
    y, draws = jnp.asarray(y), jnp.asarray(draws)
    if draws.ndim != y.ndim + 1 or draws.shape[1:] != y.shape:
        raise ValueError(
            f"Expected draws of shape (S, *N) beside y of shape (*N), got {draws.shape} and "
            f"{y.shape}."
        )
    size = draws.shape[0]
    # The sum of |x_i - x_j| over all pairs, from the draws in order.
    weights = (2 * jnp.arange(size) - size + 1).astype(draws.dtype)
    spread = jnp.tensordot(weights, jnp.sort(draws, axis=0), axes=1) / size**2
    return jnp.mean(jnp.mean(jnp.abs(draws - y[None]), axis=0) - spread)
