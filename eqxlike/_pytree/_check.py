"""A check that a pytree is a tree: no node inside itself, none in two places."""

from typing import Any

import jax.tree_util as jtu
from jaxtyping import PyTree

from ._levels import children_with_keys, contains_itself


def tree_check(pytree: PyTree) -> None:
    """Raises if a node of `pytree` contains itself, or stands in two places.

    JAX flattens and rebuilds what crosses `jax.jit`, `jax.grad` and the like, and one object in two
    places comes out as two. That is allowed, but is a surprise to whoever meant them to stay one.
    Leaves may stand anywhere as often as they like, and so may nodes without children, such as
    `None` and `()`: nothing can tell two of them apart.

    **Arguments:**

    - `pytree`: any pytree.

    **Raises:** `ValueError` that names both places.

    >>> weights = [1.0, 2.0]
    >>> tree_check({"first": weights, "second": list(weights)})
    >>> tree_check({"first": weights, "second": weights})
    Traceback (most recent call last):
    ...
    ValueError: The list at pytree['first'] stands at pytree['second'] too...
    """
    _check(pytree, (), {}, {})


Path = tuple[Any, ...]


def _check(
    node: Any, path: Path, above: dict[int, Path], finished: dict[int, tuple[Path, Any]]
) -> None:
    """Walks down from `node`.

    `above` has the nodes on the way down to it, `finished` those that lie behind: with the nodes
    themselves, since a child may be made anew by each flattening, and an `id` used again.
    """
    children = children_with_keys(node)
    if not children:
        return
    if id(node) in above:
        raise ValueError(contains_itself(node, "pytree", above[id(node)], path))
    if id(node) in finished:
        first, _ = finished[id(node)]
        raise ValueError(
            f"The {type(node).__name__} at pytree{jtu.keystr(first)} stands at "
            f"pytree{jtu.keystr(path)} too, as one and the same object. JAX rebuilds a pytree that "
            "crosses `jax.jit`, `jax.grad` and the like, and would make two separate objects of "
            "it. Put it in one place and use it from there, or a copy in the other."
        )
    above[id(node)] = path
    for key, child in children:
        _check(child, (*path, key), above, finished)
    del above[id(node)]
    finished[id(node)] = (path, node)
