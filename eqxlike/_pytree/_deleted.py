"""Arrays whose buffers are gone, since they were donated to a call."""

import jax
import jax.tree_util as jtu
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


def listed(paths: list[str]) -> str:
    """The first of `paths`, and how many more there are."""
    more = f" and {len(paths) - _MOST_PATHS} more" if len(paths) > _MOST_PATHS else ""
    return ", ".join(paths[:_MOST_PATHS]) + more
