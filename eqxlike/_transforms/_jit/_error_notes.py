"""Notes for errors of JAX, which knows arguments by their numbers: their names and paths."""

from typing import Any

import jax
import jax.tree_util as jtu

from ..._compat import Tracer
from ..._pytree import is_reference
from ._arguments import ArgumentOrder

_MOST_PATHS = 8
"""At most this many deleted arrays are listed."""


def name_deleted(
    error: Exception, order: ArgumentOrder, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """Adds to `error`, if it is of JAX and says that an array was deleted, which of the arguments.

    JAX says the shape of the first of them, or nothing.
    """
    if "deleted" not in str(error):
        return
    paths = [
        f"{name}{jtu.keystr(path)}"
        for name, argument in order.named(args, kwargs)
        for path, leaf in jtu.tree_leaves_with_path(argument)
        if isinstance(leaf, jax.Array) and not isinstance(leaf, Tracer) and leaf.is_deleted()
    ]
    if paths:
        more = f" and {len(paths) - _MOST_PATHS} more" if len(paths) > _MOST_PATHS else ""
        error.add_note(
            f"Among the arguments of {order.function_name}, these are no longer there, since "
            f"they were donated to a call: {', '.join(paths[:_MOST_PATHS])}{more}. Go on with what "
            "that call returned, or donate a copy to it."
        )


def name_references(
    error: Exception, order: ArgumentOrder, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """Adds to `error`, if it is what JAX says of a reference that is passed twice, where it stands.

    JAX knows the arguments of a function that is compiled by their numbers.
    """
    if "only one reference" not in str(error) and "both closed over and passed" not in str(error):
        return
    paths: dict[int, list[str]] = {}
    for name, argument in order.named(args, kwargs):
        for path, leaf in jtu.tree_leaves_with_path(argument):
            if is_reference(leaf):
                paths.setdefault(id(leaf), []).append(f"{name}{jtu.keystr(path)}")
    listed = ", ".join(" = ".join(each) for each in paths.values())
    error.add_note(f"The references among the arguments of {order.function_name}: {listed}.")
