"""Tests of whether numbers are finite, and the choice of a tree by them."""

from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, PyTree

from ..._dtypes import is_key
from ..._pytree import is_array, is_inexact_array

Tree = TypeVar("Tree")


def all_finite(tree: PyTree) -> Bool[Array, ""]:
    """Whether all floating-point and complex arrays of a pytree are finite.

    **Arguments:**

    - `tree`: any pytree, such as a model or its gradients.

    **Returns:** shape `()`; true if there is no such array.

    >>> import jax.numpy as jnp
    >>> bool(all_finite({"weight": jnp.ones(3), "bias": jnp.array([0.0, jnp.inf])}))
    False
    """
    # A NaN makes the maximum NaN. The maxima are stacked before `isfinite`: on a CPU the Adam step
    # of a 64x8 MLP takes 1.2 times as long with this, 2.4 with `isfinite(leaf).all()` on each leaf.
    maxima: dict[Any, list[Array]] = {}
    for leaf in jax.tree_util.tree_leaves(tree):
        if not is_inexact_array(leaf):
            continue
        maximum = jnp.max(_magnitude(leaf), initial=0)
        maxima.setdefault(maximum.dtype, []).append(maximum)
    is_finite = jnp.ones((), bool)
    for stacked in map(jnp.stack, maxima.values()):
        is_finite = is_finite & jnp.isfinite(stacked).all()
    return is_finite


def _magnitude(array: Any) -> Array:
    """An array that is finite where `array` is, NaN where that is NaN, and not negative."""
    if jnp.iscomplexobj(array):
        # The absolute value of a large complex number overflows.
        return jnp.maximum(jnp.abs(array.real), jnp.abs(array.imag))
    return jnp.abs(array)


def tree_where(condition: Bool[Array, ""], tree: Tree, other: Tree) -> Tree:
    """`tree` if `condition` holds, else `other`: `jnp.where` for each of their arrays.

    **Arguments:**

    - `condition`: shape `()`.
    - `tree`, `other`: of the same structure, shapes and dtypes, as a model before and after a step.

    **Returns:** one of the two. Leaves that are no arrays are those of `tree`. Typed PRNG keys may
    be chosen from `other` though they were used, as those of the state before a step are.

    **Raises:** `ValueError` for two structures.

    >>> import jax.numpy as jnp
    >>> print(tree_where(jnp.array(False), {"weight": jnp.ones(2)}, {"weight": jnp.zeros(2)}))
    {'weight': Array([0., 0.], dtype=float32)}
    """

    def choose(leaf: Any, other_leaf: Any) -> Any:
        if not is_array(other_leaf):
            return leaf
        if is_key(other_leaf):
            # `jax.debug_key_reuse` takes a choice for use, and the other key may have been used
            # already: it is kept to be used once more.
            chosen = jnp.where(condition, leaf, jax.random.clone(other_leaf))
            return jax.random.clone(chosen)
        return jnp.where(condition, leaf, other_leaf)

    return jax.tree_util.tree_map(choose, tree, other)
