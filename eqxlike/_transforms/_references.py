"""Mutable arrays, `jax.Ref`, which a traced function may take but not return."""

from collections.abc import Callable
from typing import Any

import jax
import jax.tree_util as jtu
from jaxtyping import PyTree

from .._pytree import is_traced_reference


def refuse_references(
    output: PyTree,
    returned_by: str,
    is_refused: Callable[[Any], bool] = is_traced_reference,
) -> PyTree:
    """The `output` of a traced function; raises `ValueError` if there is a reference in it."""
    for path, leaf in jtu.tree_leaves_with_path(output):
        if is_refused(leaf):
            raise ValueError(
                f"output{jtu.keystr(path)}, which {returned_by} returns, is a mutable array "
                f"reference of type {jax.typeof(leaf)}. As from `jax.jit`, it cannot be returned "
                "from a function that is traced: return what it holds, `reference[...]`, or write "
                "to one that is passed as an argument."
            )
    return output
