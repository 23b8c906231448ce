"""Mutable arrays, `jax.Ref`: arguments of traced functions, and never their outcome."""

from collections.abc import Callable
from typing import Any

import jax
import jax.tree_util as jtu
from jaxtyping import PyTree

from .._pytree import is_reference, is_traced_reference
from ._spelling import Spelling


def name_references(
    error: Exception, spelling: Spelling, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """Adds to `error`, if it is what JAX says of a reference that is passed twice, where it stands.

    JAX knows the arguments of a function that is compiled by their numbers.
    """
    if "only one reference" not in str(error) and "both closed over and passed" not in str(error):
        return
    paths: dict[int, list[str]] = {}
    for name, argument in spelling.named(args, kwargs):
        for path, leaf in jtu.tree_leaves_with_path(argument):
            if is_reference(leaf):
                paths.setdefault(id(leaf), []).append(f"{name}{jtu.keystr(path)}")
    listed = ", ".join(" = ".join(each) for each in paths.values())
    error.add_note(f"The references among the arguments of {spelling.function_name}: {listed}.")


def refuse_references(
    outcome: PyTree,
    returned_by: str,
    is_refused: Callable[[Any], bool] = is_traced_reference,
) -> PyTree:
    """`outcome`, of a function that is traced; `ValueError` if there is a reference in it."""
    for path, leaf in jtu.tree_leaves_with_path(outcome):
        if is_refused(leaf):
            raise ValueError(
                f"outcome{jtu.keystr(path)}, which {returned_by} returns, is a mutable array "
                f"reference of type {jax.typeof(leaf)}. As from `jax.jit`, it cannot be returned "
                "from a function that is traced: return what it holds, `reference[...]`, or write "
                "to one that is passed as an argument."
            )
    return outcome
