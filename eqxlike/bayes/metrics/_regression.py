"""Measures of predictions of numbers. `N` is the number of examples."""

import jax.numpy as jnp
from jaxtyping import Array, Float

from ._checks import check_same_shape


def rmse(y: Float[Array, "*N"], prediction: Float[Array, "*N"]) -> Float[Array, ""]:
    """The root mean squared error, `sqrt(mean((y - prediction)^2))`.

    **Arguments:**

    - `y`, `prediction`: arrays of one shape, in one unit.

    **Returns:** shape `()`, in the unit of `y`.

    **Raises:** `ValueError` if the shapes differ; `TypeError` for a prediction among them.

    >>> import jax.numpy as jnp
    >>> float(rmse(jnp.array([1.0, 2.0]), jnp.array([3.0, 4.0])))
    2.0
    """
    check_same_shape("rmse(y, prediction.mean)", y=y, prediction=prediction)
    return jnp.sqrt(jnp.mean((jnp.asarray(y) - jnp.asarray(prediction)) ** 2))


def coverage(
    y: Float[Array, "*N"], lower: Float[Array, "*N"], upper: Float[Array, "*N"]
) -> Float[Array, ""]:
    """The fraction of `y` within `[lower, upper]`.

    **Arguments:**

    - `y`, `lower`, `upper`: arrays of one shape, in one unit.

    **Returns:** shape `()`, between 0 and 1.

    **Raises:** `ValueError` if the shapes differ; `TypeError` for a prediction among them.

    >>> import jax.numpy as jnp
    >>> y = jnp.array([1.0, 2.0, 3.0, 4.0])
    >>> float(coverage(y, jnp.zeros(4), jnp.full(4, 3.0)))
    0.75
    """
    call = "coverage(y, *prediction.interval(0.9))"
    check_same_shape(call, y=y, lower=lower, upper=upper)
    y, lower, upper = jnp.asarray(y), jnp.asarray(lower), jnp.asarray(upper)
    return jnp.mean((lower <= y) & (y <= upper), dtype=y.dtype)


def sharpness(lower: Float[Array, "*N"], upper: Float[Array, "*N"]) -> Float[Array, ""]:
    """The mean width of the intervals `[lower, upper]`: of two that cover, the sharper is better.

    **Arguments:**

    - `lower`, `upper`: arrays of one shape, in one unit.

    **Returns:** shape `()`, in their unit.

    **Raises:** `ValueError` if the shapes differ; `TypeError` for a prediction among them.

    >>> import jax.numpy as jnp
    >>> float(sharpness(jnp.zeros(2), jnp.array([1.0, 3.0])))
    2.0
    """
    check_same_shape("sharpness(*prediction.interval(0.9))", lower=lower, upper=upper)
    return jnp.mean(jnp.asarray(upper) - jnp.asarray(lower))
