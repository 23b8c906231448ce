"""A function traced and lowered for a report, or one clear line that says why not."""

import functools
import inspect
import time
from typing import Any

import jax.tree_util as jtu

from .._compat import PjitFunction
from .._module import Wrapper
from .._transforms import Anew, is_array_or_struct, trace_anew


def traced(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], what: str = "") -> Anew:
    """`function` as it is traced for these arguments.

    **Raises:** `ValueError` if the trace fails.
    """
    try:
        if isinstance(function, PjitFunction):
            return _of_jax(function, args, kwargs)
        return trace_anew(function, args, kwargs)._replace(name=name_of(function))
    except Exception as error:
        reason = " ".join([type(error).__name__ + ":", *str(error).strip().splitlines()[:1]])
        reason = reason.rstrip(".:") + "."
        raise ValueError(
            f"graph.report could not trace {what}{name_of(function)}: {reason}"
            f"{_others(function, args, kwargs)}"
        ) from error


def name_of(function: Any) -> str:
    """The name of a function; of a Module that of its class."""
    while isinstance(function, Wrapper):
        function = function.__wrapped__
    if isinstance(function, functools.partial):
        return name_of(function.func)
    return getattr(function, "__name__", type(function).__name__)


def _of_jax(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Anew:
    """A function of `jax.jit`, which is traced as it is, with the options that it has."""
    start_s = time.perf_counter()
    found = function.trace(*args, **kwargs)
    traced_s = time.perf_counter()
    lowered = found.lower()
    lowered_s = time.perf_counter()
    paths = [path for path, leaf in _leaves(function, args, kwargs) if is_array_or_struct(leaf)]
    num_inputs = len(found.jaxpr.jaxpr.invars)
    if len(paths) != num_inputs:
        paths = [f"array {index}" for index in range(num_inputs)]
    times = traced_s - start_s, lowered_s - traced_s
    return Anew(name_of(function), found, lowered, tuple(paths), *times)


def _leaves(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[tuple[str, Any]]:
    """The leaves of the arguments, with paths from the names of the parameters on."""
    labels = _labels(function, len(args))
    pairs = [*zip(labels, args, strict=True), *sorted(kwargs.items())]
    return [
        (label + jtu.keystr(path), leaf)
        for label, arg in pairs
        for path, leaf in jtu.tree_leaves_with_path(arg)
    ]


def _labels(function: Any, num_args: int) -> list[str]:
    """The names of positional arguments."""
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        parameters = []
    by_place = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    names = [each.name for each in parameters if each.kind in by_place][:num_args]
    more = (each.name for each in parameters if each.kind is inspect.Parameter.VAR_POSITIONAL)
    variadic = next(more, "args")
    return [*names, *(f"{variadic}[{index}]" for index in range(num_args - len(names)))]


def _others(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """A note on the arguments that are no arrays, and so were passed as they are."""
    others = [
        f"{path} ({type(leaf).__name__})"
        for path, leaf in _leaves(function, args, kwargs)
        if not is_array_or_struct(leaf) and not callable(leaf)
    ]
    if not others:
        return ""
    more = ", ..." if len(others) > 3 else ""
    return f" No arrays are {', '.join(others[:3])}{more}."
