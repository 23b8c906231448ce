"""Checks of what a layer is called with, and the place of the layer in the model."""

import sys
from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
import jax.tree_util as jtu

from ..._module import BoundMethod, Module

Shape = tuple[int | str | None, ...]
"""Sizes by axis; a string names a size that may be any, and `"..."` any number of axes."""


def check_instance(model: Any, what: str) -> None:
    """Raises `TypeError` if `model`, which `what` takes, is a class."""
    if isinstance(model, type):
        name = model.__name__
        raise TypeError(
            f"{what} expected an instance, got the class {name}: call it, `{name}(...)`."
        )


def check_input(layer: Module, x: Any, expected: Shape, name: str = "x") -> None:
    """Raises `ValueError` unless `x` is one unbatched input of the shape that `layer` expects.

    The message says where in the user's model the layer stands.
    """
    shape = jnp.shape(x)
    if _fits(shape, expected):
        return
    message = f"{describe(layer)} expected {name} of shape {_show(expected)}, got shape {shape}."
    if len(shape) > len(expected) and _fits(shape[len(shape) - len(expected) :], expected):
        message += " It takes one example at a time: for a batch write `jax.vmap(layer)(x)`."
    raise ValueError(message)


def _fits(shape: tuple[int, ...], expected: Shape) -> bool:
    if "..." in expected:
        at = expected.index("...")
        num_after = len(expected) - at - 1
        if len(shape) < len(expected) - 1:
            return False
        before, after = shape[:at], shape[len(shape) - num_after :]
        return _fits(before, expected[:at]) and _fits(after, expected[at + 1 :])
    return len(shape) == len(expected) and all(
        not isinstance(wanted, int) or size == wanted
        for size, wanted in zip(shape, expected, strict=True)
    )


def _show(expected: Shape) -> str:
    sizes = ", ".join(map(str, expected))
    return f"({sizes},)" if len(expected) == 1 else f"({sizes})"


def describe(layer: Module) -> str:
    """The type of a layer that is being called, and its path in the model that calls it.

    Looked up only once something is wrong: in the frames of the calls that led here, whose first
    arguments are the Modules around the layer.
    """
    name = type(layer).__name__
    outermost, path = None, ""
    for module in _callers():
        if module is not layer and (found := _path_to(layer, module)) is not None:
            outermost, path = module, found
    if outermost is None:
        return name
    return f"{name} at {type(outermost).__name__}{path}"


def _callers() -> Iterator[Module]:
    """The Modules whose methods are running, from the innermost outward."""
    frame = sys._getframe(2)
    while frame is not None:
        names = frame.f_code.co_varnames[: frame.f_code.co_argcount]
        first = frame.f_locals.get(names[0]) if names else None
        # A method under way has the Module it is bound to as its own first argument, further in.
        if isinstance(first, Module) and not isinstance(first, BoundMethod):
            yield first
        frame = frame.f_back


def _path_to(layer: Module, module: Module) -> str | None:
    # By identity: an equal layer at another place is another layer.
    for path, node in jtu.tree_leaves_with_path(module, is_leaf=lambda node: node is layer):
        if node is layer:
            return jtu.keystr(path)
    return None
