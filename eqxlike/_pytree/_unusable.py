"""Arrays that no call takes: those that were donated to one, and those of no numbers."""

import jax
import jax.tree_util as jtu
import numpy as np
from jaxtyping import PyTree

from .._compat import Tracer

_MOST_PATHS = 8
"""At most this many paths are listed."""


def deleted_paths(tree: PyTree, name: str = "") -> list[str]:
    """The paths of the deleted arrays in `tree`, which a message calls `name`."""
    return [
        f"{name}{jtu.keystr(path)}"
        for path, leaf in jtu.tree_leaves_with_path(tree)
        if isinstance(leaf, jax.Array) and not isinstance(leaf, Tracer) and leaf.is_deleted()
    ]


def paths_without_numbers(tree: PyTree, name: str = "") -> list[str]:
    """The paths of NumPy's arrays of strings, objects or dates in `tree`, each with its dtype."""
    return [
        f"{name}{jtu.keystr(path)} ({leaf.dtype})"
        for path, leaf in jtu.tree_leaves_with_path(tree)
        # JAX's own float types are of kind "V".
        if isinstance(leaf, np.ndarray | np.generic) and leaf.dtype.kind in "OSUMm"
    ]


def listed(paths: list[str]) -> str:
    """The first of `paths`, and how many more there are."""
    more = f" and {len(paths) - _MOST_PATHS} more" if len(paths) > _MOST_PATHS else ""
    return ", ".join(paths[:_MOST_PATHS]) + more
