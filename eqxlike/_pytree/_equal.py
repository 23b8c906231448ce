"""Equality of pytrees: structure, types, values."""

from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jaxtyping import Array, Bool, PyTree

from .._compat import Tracer
from ._predicates import is_array


def tree_equal(
    *pytrees: PyTree,
    typematch: bool = False,
    rtol: float | np.ndarray | np.number | Array = 0.0,
    atol: float | np.ndarray | np.number | Array = 0.0,
) -> bool | Bool[Array, ""]:
    """Whether all `pytrees` have the same structure and equal leaves.

    **Arguments:**

    - `*pytrees`: any number of pytrees of any structure.
    - `typematch`: also ask that corresponding leaves have the same type, so that `1`, `1.0`,
      `np.ones(())` and `jnp.ones(())` differ.
    - `rtol`, `atol`: scalars; with either, floating-point and complex arrays need only be close:
      `|x - y| <= atol + rtol * |y|`.

    Arrays are equal if shape, dtype and all elements are; an array never equals what is not one.

    **Returns:** a `bool`, or under a transformation, if it depends on traced values, a boolean
    scalar array.

    >>> tree_equal((1, np.ones(2)), (1, np.ones(2)))
    True
    >>> tree_equal(1, 1.0), tree_equal(1, 1.0, typematch=True)
    (True, False)
    """
    if len(pytrees) < 2:
        return True
    first_leaves, first_treedef = jtu.tree_flatten(pytrees[0])
    traced: list[Bool[Array, ""]] = []
    for pytree in pytrees[1:]:
        leaves, treedef = jtu.tree_flatten(pytree)
        if treedef != first_treedef:
            return False
        for x, y in zip(first_leaves, leaves, strict=True):
            if typematch and not _same_type(x, y):
                return False
            same = _leaves_equal(x, y, rtol, atol)
            if isinstance(same, Tracer):
                traced.append(same)
            elif not same:
                return False
    if traced:
        return jnp.all(jnp.stack(traced))
    return True


def _same_type(x: Any, y: Any) -> bool:
    # A tracer stands for a JAX array.
    if isinstance(x, jax.Array) and isinstance(y, jax.Array):
        return True
    return type(x) is type(y)


def _leaves_equal(x: Any, y: Any, rtol: Any, atol: Any) -> Any:
    if not (is_array(x) and is_array(y)):
        return not is_array(x) and not is_array(y) and bool(x == y)
    if x.shape != y.shape or x.dtype != y.dtype:
        return False
    numpy = np if not isinstance(x, jax.Array) and not isinstance(y, jax.Array) else jnp
    is_exact = isinstance(rtol, float | int) and rtol == 0 and isinstance(atol, float | int)
    is_exact = is_exact and atol == 0
    if is_exact or not jnp.issubdtype(x.dtype, jnp.inexact):
        same = numpy.all(x == y)
    else:
        same = numpy.allclose(x, y, rtol=rtol, atol=atol)
    return same if isinstance(same, Tracer) else bool(same)
