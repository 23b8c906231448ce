"""The programs of a function and of its gradient."""

import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu

from .._module import Module
from .._partition import split
from .._pytree import is_array, is_inexact_array
from .._transforms import JitFunction, is_array_or_struct
from ._traced import name_of


def gradient_of(function: Any, args: tuple[Any, ...]) -> tuple[Any, Any, tuple[Any, ...]]:
    """A function that computes the output of `function` and its gradient, and one that computes
    what the way there stores for the way back.

    A Module is differentiated by its own arrays, any other function by its first argument. Each
    floating-point array of the output is pulled back with a cotangent of ones.
    """
    if isinstance(function, JitFunction):
        function = function.__wrapped__
    is_model = isinstance(function, Module) and any(map(_is_inexact, jtu.tree_leaves(function)))
    if not is_model and not args:
        raise ValueError(
            "graph.report(gradient=True) differentiates a Module by its arrays and a function by "
            f"its first argument: give {name_of(function)} one."
        )
    subject = function if is_model else args[0]
    if not any(map(_is_inexact, jtu.tree_leaves(subject))):
        raise ValueError(
            "graph.report(gradient=True) differentiates by floating-point arrays, and the first "
            f"argument of {name_of(function)}, of type {type(subject).__name__}, has none: "
            f"{jtu.tree_leaves(subject)!r:.80}."
        )

    def pulled_back(*arguments: Any, **kwargs: Any) -> tuple[list[Any], Any]:
        first, *rest_of_arguments = arguments
        arrays, rest = split(first, is_inexact_array)

        def of_arrays(arrays: list[Any]) -> list[Any]:
            merged = rest.merge(arrays)
            call: Any = merged if is_model else function
            given = rest_of_arguments if is_model else (merged, *rest_of_arguments)
            return list(filter(_is_inexact, jtu.tree_leaves(call(*given, **kwargs))))

        outputs, pull_back = jax.vjp(of_arrays, arrays)
        if not outputs:
            raise ValueError(
                f"{name_of(function)} returns no floating-point array to differentiate"
            )
        return outputs, pull_back

    def gradient(*arguments: Any, **kwargs: Any) -> Any:
        outputs, pull_back = pulled_back(*arguments, **kwargs)
        return outputs, pull_back([jnp.ones_like(each) for each in outputs])

    def stored(*arguments: Any, **kwargs: Any) -> list[Any]:
        _, pull_back = pulled_back(*arguments, **kwargs)
        return list(filter(is_array, jtu.tree_leaves(pull_back)))

    arguments = (function, *args) if is_model else args
    return _like(function, gradient, is_model), _like(function, stored, is_model), arguments


_LEFT_OUT = object()


def _is_inexact(leaf: Any) -> bool:
    return is_array_or_struct(leaf) and jnp.issubdtype(leaf.dtype, jnp.inexact)


def _like(function: Any, new: Callable[..., Any], is_model: bool) -> Any:
    """`new` with the name and parameters of `function`; a model itself is the first of these."""
    name = name_of(function)
    new.__name__ = new.__qualname__ = name
    try:
        # A default that is filled in is passed on, which not every function takes.
        parameters = [
            each if each.default is inspect.Parameter.empty else each.replace(default=_LEFT_OUT)
            for each in inspect.signature(function).parameters.values()
        ]
        if is_model:
            parameters.insert(0, inspect.Parameter(name, inspect.Parameter.POSITIONAL_ONLY))
        signature = inspect.Signature(parameters)
    # Some functions tell no parameters, and not every name can be that of one.
    except (TypeError, ValueError):
        return new
    vars(new)["__signature__"] = signature
    return new
