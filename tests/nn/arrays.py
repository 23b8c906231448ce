"""Random arrays drawn by NumPy, without compilation for each shape, and comparisons of trees."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np

import eqxlike as eqx


def normal(key: jax.Array, shape: tuple[int, ...], dtype: jnp.dtype = jnp.float32) -> jax.Array:
    """Normally distributed numbers. `key` seeds NumPy's generator."""
    with jax.ensure_compile_time_eval():
        generator = np.random.default_rng(np.asarray(jr.key_data(key)))
    drawn = generator.normal(size=shape)
    if jnp.issubdtype(dtype, jnp.complexfloating):
        drawn = drawn + 1j * generator.normal(size=shape)
    return jax.device_put(np.asarray(drawn).astype(dtype))


def filled(make: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """The output of `make` with positive numbers as parameters. Each row of weights sums to less
    than 1.
    """
    generator = np.random.default_rng(0)

    def fill(leaf):
        if not isinstance(leaf, jax.ShapeDtypeStruct):
            return leaf
        most = 1 if leaf.ndim < 2 else 1 / max(leaf.shape[-1], 1)
        return jax.device_put(generator.uniform(0.1 * most, most, leaf.shape).astype(leaf.dtype))

    return jax.tree.map(fill, eqx.filter_eval_shape(make, *args, **kwargs))


def assert_close(
    found: Any, expected: Any, rtol: float = 1e-5, atol: float = 1e-6, **options: Any
) -> None:
    """Compares the leaves of two trees."""
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, rtol=rtol, atol=atol, **options)


def paths(tree: Any, keep: Callable[[Any], Any] = lambda leaf: True, **options: Any) -> list[str]:
    """The paths of the leaves that `keep` chooses."""
    leaves = jax.tree_util.tree_leaves_with_path(tree, **options)
    return [jax.tree_util.keystr(path) for path, leaf in leaves if keep(leaf)]
