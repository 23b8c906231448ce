"""Numbers from a file in the place of a leaf: of its type, and where it was."""

from typing import Any

import jax
import numpy as np

from ..._compat import Tracer


def sharding_on_purpose(like: Any) -> jax.sharding.Sharding | None:
    """Where somebody has put `like`; `None` if JAX has."""
    if isinstance(like, jax.ShapeDtypeStruct):
        return like.sharding
    is_placed = isinstance(like, jax.Array) and not isinstance(like, Tracer) and like.committed
    return like.sharding if is_placed else None


def place_like(value: Any, like: Any) -> Any:
    """The numbers in `value`, an array of JAX's or NumPy's, as what `like` is.

    Nobody else may have `value`: on a CPU JAX takes over the memory of NumPy's arrays.
    """
    if isinstance(like, np.ndarray | np.generic):
        array = np.asarray(value).astype(like.dtype, copy=False)
        return array if isinstance(like, np.ndarray) else array[()]
    return jax.device_put(value, sharding_on_purpose(like))
