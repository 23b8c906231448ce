"""Trees as a user has them, and lists of arrays as the loops have them."""

from typing import Any

import jax.numpy as jnp
import jax.random as jr
from jaxtyping import Array, PyTree

from .._dtypes import is_key
from .._partition import split
from .._pytree import is_array_like
from ._flat._scan import Arrays


class Form:
    """All that a tree is, but the values of its arrays."""

    def __init__(self, tree: PyTree):
        leaves, self._rest = split(tree, is_array_like)
        self._key_impls = [_impl_of_key(leaf) for leaf in leaves]

    def unflatten(self, arrays: Arrays) -> PyTree:
        """The tree of this form that has these arrays."""
        return self._rest.merge(
            array if impl is None else jr.wrap_key_data(array, impl=impl)
            for array, impl in zip(arrays, self._key_impls, strict=True)
        )


def take_arrays(tree: PyTree) -> list[Array]:
    """The arrays of a tree; random keys as the numbers that they are made of."""
    leaves, _ = split(tree, is_array_like)
    return [
        jnp.asarray(leaf) if _impl_of_key(leaf) is None else jr.key_data(leaf) for leaf in leaves
    ]


def _impl_of_key(leaf: Any) -> Any:
    return jr.key_impl(leaf) if is_key(leaf) else None
