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
    # A number times 0 is 0 or NaN. A maximum will not do: XLA's of a large array on a CPU passes
    # over NaN (JAX 0.10.2 to 0.12.0.1). `isfinite(leaf).all()` takes twice as long.
    sums: dict[Any, list[Array]] = {}
    for leaf in jax.tree_util.tree_leaves(tree):
        if is_inexact_array(leaf):
            sums.setdefault(leaf.dtype, []).append(jnp.sum(0 * leaf))
    is_finite = jnp.ones((), bool)
    for stacked in map(jnp.stack, sums.values()):
        is_finite = is_finite & jnp.isfinite(stacked).all()
    return is_finite


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
