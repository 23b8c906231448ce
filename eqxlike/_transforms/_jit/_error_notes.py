"""Notes on the errors of a call, which name the arguments that they mean, by name and path.

JAX knows the arguments of a compiled function by their numbers alone.
"""

from typing import Any

import jax.tree_util as jtu
import numpy as np

from ..._pytree import deleted_paths, is_reference, listed, paths_without_numbers
from ._arguments import ArgumentOrder


def _deleted_arguments(
    order: ArgumentOrder, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> list[str]:
    named = order.named(args, kwargs)
    return [path for name, argument in named for path in deleted_paths(argument, name)]


def name_deleted(
    error: Exception, order: ArgumentOrder, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """Adds a note to `error` that names the deleted arguments, if JAX complains of such an array.

    JAX gives the shape of the first of them, or nothing.
    """
    paths = _deleted_arguments(order, args, kwargs) if "deleted" in str(error) else []
    if paths:
        error.add_note(
            f"Among the arguments of {order.function_name}, these are no longer there, since "
            f"they were donated to a call: {listed(paths)}. Go on with what that call returned, "
            "or donate a copy to it."
        )


def name_donated(
    failure: Exception, order: ArgumentOrder, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """Adds a note to `failure`, of a check, that names the arguments that its call has used up."""
    paths = _deleted_arguments(order, args, kwargs)
    if paths:
        failure.add_note(
            f"Donated to the call that failed, and so no longer there: {listed(paths)}."
        )


def name_host_arrays(
    error: Exception, order: ArgumentOrder, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """Adds a note to `error` that names the arrays of NumPy, if JAX must not copy such an array."""
    if "Disallowed host-to-device" not in str(error):
        return
    paths = [
        f"{name}{jtu.keystr(path)}"
        for name, argument in order.named(args, kwargs)
        for path, leaf in jtu.tree_leaves_with_path(argument)
        if isinstance(leaf, np.ndarray | np.generic)
    ]
    if paths:
        error.add_note(
            f"Among the arguments of {order.function_name}, these are arrays of NumPy, which each "
            f"call copies to the device: {listed(paths)}. Put them there with `jax.device_put`."
        )


def name_references(
    error: Exception, order: ArgumentOrder, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """Adds a note to `error` that names the references, if one of them was passed twice."""
    if "only one reference" not in str(error) and "both closed over and passed" not in str(error):
        return
    paths: dict[int, list[str]] = {}
    for name, argument in order.named(args, kwargs):
        for path, leaf in jtu.tree_leaves_with_path(argument):
            if is_reference(leaf):
                paths.setdefault(id(leaf), []).append(f"{name}{jtu.keystr(path)}")
    places = ", ".join(" = ".join(each) for each in paths.values())
    error.add_note(f"The references among the arguments of {order.function_name}: {places}.")


def name_other_than_numbers(
    error: Exception, order: ArgumentOrder, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """Adds a note to `error` that names the arrays of strings and the like, which JAX refuses."""
    if not isinstance(error, TypeError):
        return
    named = order.named(args, kwargs)
    paths = [path for name, argument in named for path in paths_without_numbers(argument, name)]
    if paths:
        error.add_note(
            f"Among the arguments of {order.function_name}, these arrays hold no numbers: "
            f"{listed(paths)}. Give numbers, or keep the values in a static field, as a tuple."
        )
