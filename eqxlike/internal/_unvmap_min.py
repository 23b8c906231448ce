"""The smallest of a batch."""

from jaxtyping import Array, Shaped

from ..loops import unvmap_max


def unvmap_min(x: Shaped[Array, "..."]) -> Shaped[Array, ""]:
    """The smallest of `x` in all members of all batches: never mapped itself.

    >>> import jax.numpy as jnp
    >>> print(unvmap_min(jnp.array([2.0, 1.0])))
    1.0
    """
    return -unvmap_max(-x)
