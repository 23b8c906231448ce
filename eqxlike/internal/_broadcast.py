"""Broadcasting that begins with the leading axis."""

import jax.numpy as jnp
from jaxtyping import Array, ArrayLike


def left_broadcast_to(arr: ArrayLike, shape: tuple[int, ...]) -> Array:
    """`arr` with axes of length one behind its own, broadcast to `shape`.

    **Raises:** `ValueError` if `shape` has fewer axes, or its leading ones are others.

    >>> print(left_broadcast_to(jnp.arange(2), (2, 3)))
    [[0 0 0]
     [1 1 1]]
    """
    arr = jnp.asarray(arr)
    if arr.ndim > len(shape):
        raise ValueError(
            f"left_broadcast_to expected at least the {arr.ndim} axes of an array of shape "
            f"{arr.shape}; got shape {shape}."
        )
    return jnp.broadcast_to(arr.reshape(arr.shape + (1,) * (len(shape) - arr.ndim)), shape)
