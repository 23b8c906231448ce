"""Tangents that are zero, as arrays."""

from typing import Any

import jax
from jax.core import ShapedArray
from jax.interpreters import ad

from .._pytree import is_array_like


def materialise_zeros(primal: Any, tangent: Any, allow_struct: bool = False) -> Any:
    """The tangent, or if it is `None` one of zeros beside `primal`.

    **Arguments:**

    - `primal`: an array or a number; for anything else the tangent stays `None`.
    - `tangent`: an array, or `None` for zero.
    - `allow_struct`: whether a `jax.ShapeDtypeStruct` may stand for an array as `primal`.

    **Returns:** an array of the shape of the primal and of the dtype of its tangents, which for
    integers is JAX's `float0`.

    >>> import jax.numpy as jnp
    >>> materialise_zeros(jnp.ones(2), None)
    Array([0., 0.], dtype=float32)
    """
    if tangent is not None:
        return tangent
    if is_array_like(primal):
        aval = jax.typeof(primal)
    elif allow_struct and isinstance(primal, jax.ShapeDtypeStruct):
        aval = ShapedArray(primal.shape, primal.dtype)
    else:
        return None
    return ad.instantiate_zeros(ad.Zero(aval.to_tangent_aval()))
