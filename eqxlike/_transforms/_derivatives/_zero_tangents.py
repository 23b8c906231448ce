"""Tangents, of which some are known to be zero."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import SymbolicZero
from jax.interpreters import ad
from jaxtyping import Array


def is_inexact(array: Any) -> bool:
    return jnp.issubdtype(array.dtype, jnp.inexact)


def has_tangent(tangent: Any) -> bool:
    """Whether it is one, and not known to be zero."""
    is_zero = isinstance(tangent, SymbolicZero | ad.Zero)
    return not is_zero and tangent.dtype != jax.dtypes.float0


def instantiate(tangent: Any) -> Array:
    """The tangent, with zeros for a `SymbolicZero`."""
    if type(tangent) is not SymbolicZero:
        return tangent
    aval: Any = tangent.aval
    return jnp.zeros(aval.shape, aval.dtype)


def zero_tangent(array: Array) -> Any:
    """The tangent of an array that has none."""
    if is_inexact(array):
        return SymbolicZero(jax.typeof(array).to_tangent_aval())
    return np.zeros(array.shape, jax.dtypes.float0)


def jvp_of_moving(
    function: Callable[[list[Array]], Any], primals: Sequence[Array], tangents: Sequence[Any]
) -> Any:
    """As `jax.jvp` of a function of a list, in which arrays without a tangent do not move."""
    moving = [place for place, tangent in enumerate(tangents) if has_tangent(tangent)]

    def of_moving(*values: Array) -> Any:
        arrays = list(primals)
        for place, value in zip(moving, values, strict=True):
            arrays[place] = value
        return function(arrays)

    return jax.jvp(
        of_moving,
        tuple(primals[place] for place in moving),
        tuple(tangents[place] for place in moving),
    )
