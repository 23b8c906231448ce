"""Running a function on shapes alone."""

from collections.abc import Callable
from typing import Any

import jax
from jaxtyping import PyTree

from .._partition import Rest, split
from .._pytree import is_array


def filter_eval_shape(
    fun: Callable[..., Any], *args: Any, **kwargs: Any
) -> PyTree[jax.ShapeDtypeStruct | Any]:
    """What `fun(*args, **kwargs)` returns, with a `jax.ShapeDtypeStruct` for each array.

    Nothing is computed. Arguments that are no arrays are passed as they are, and outcomes that
    are no arrays come back as they are.

    **Arguments:**

    - `fun`: any callable, a Module or the class of one too.
    - `*args`, `**kwargs`: any pytrees; a `jax.ShapeDtypeStruct` stands for an array.

    !!! example

        >>> import eqxlike as eqx, jax, jax.numpy as jnp
        >>> eqx.filter_eval_shape(lambda x, name: (x.sum(), name), jnp.ones((2, 3)), "total")
        (ShapeDtypeStruct(shape=(), dtype=float32), 'total')
    """
    arrays, call_rest = split((fun, args, kwargs), _is_array_or_struct)
    outcome_rest: list[Rest] = []

    def of_arrays(arrays: list[Any]) -> list[Any]:
        fun, args, kwargs = call_rest.merge(arrays)
        outcome_arrays, rest = split(fun(*args, **kwargs), is_array)
        outcome_rest[:] = [rest]
        return outcome_arrays

    structs = jax.eval_shape(of_arrays, arrays)
    return outcome_rest[0].merge(structs)


def _is_array_or_struct(leaf: Any) -> bool:
    return is_array(leaf) or isinstance(leaf, jax.ShapeDtypeStruct)
