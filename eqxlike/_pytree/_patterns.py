"""Patterns for the paths of arrays in a tree."""

import re
from collections.abc import Callable

import jax

Which = str | Callable[[str, jax.ShapeDtypeStruct], bool]
"""A pattern such as `layers[*].weight`, or a function of path and leaf that returns a bool."""


def path_matches(which: Which, path: str, leaf: jax.ShapeDtypeStruct) -> bool:
    """Whether the array at a path is one of those that a pattern means.

    `*` stands for a name or an index, `**` for anything.
    """
    return bool(which(path, leaf) if callable(which) else _regex(which).fullmatch(path))


def _regex(pattern: str) -> re.Pattern[str]:
    parts = re.split(r"(\*\*|\*)", pattern)
    meanings = {"**": ".*", "*": r"[^.\[\]]*"}
    return re.compile("".join(meanings.get(part, re.escape(part)) for part in parts))
