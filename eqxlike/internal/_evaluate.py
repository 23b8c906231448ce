"""Arrays of the shapes that a function would return."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
from jaxtyping import PyTree

from .._transforms import filter_eval_shape


def eval_zero(fn: Callable[..., Any], *inputs: PyTree) -> PyTree:
    """Zeros of the shapes and dtypes of what `fn(*inputs)` returns. Nothing is computed.

    Leaves that are no arrays are as `fn` returned them.

    >>> eval_zero(lambda x: (x > 0, 2 * x), jnp.ones(2))
    (Array([False, False], dtype=bool), Array([0., 0.], dtype=float32))
    """
    return _filled(jnp.zeros, fn, inputs)


def eval_empty(fn: Callable[..., Any], *inputs: PyTree) -> PyTree:
    """As `eval_zero`, with arrays whose values do not matter."""
    return _filled(jnp.empty, fn, inputs)


def _filled(make: Callable[..., Any], fn: Callable[..., Any], inputs: tuple[PyTree, ...]) -> PyTree:
    def fill(leaf: Any) -> Any:
        return make(leaf.shape, leaf.dtype) if isinstance(leaf, jax.ShapeDtypeStruct) else leaf

    return jtu.tree_map(fill, filter_eval_shape(fn, *inputs))
