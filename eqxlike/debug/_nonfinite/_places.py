"""Where an operation stands: the layer that was being called, and the line of source."""

import contextlib
import inspect
import os
import re
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.tree_util as jtu

from ..._module import Module, Wrapper, observe_calls

_SCOPE = "eqxlike-layer-"
_IN_SCOPE = re.compile(rf"{_SCOPE}(\d+)")

_PACKAGE = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
_MACHINERY = (
    "<eqxlike ",
    os.path.join(os.path.dirname(os.path.abspath(jax.__file__)), ""),
    *(
        os.path.join(_PACKAGE, name, "")
        for name in ("_module", "_partition", "_transforms", "ad", "debug", "loops")
    ),
)
"""What stands between an operation and the line of a user, or of a layer, that asked for it."""


class _Scope:
    """Names what a layer makes.

    All of one call of `find_nonfinite` are equal: a program that maps one tree onto another, as a
    step of a training does with the model and what its optimiser keeps, is to find them of one
    structure, as they were. Those of different calls are not, since JAX keeps what it has traced.
    """

    def __init__(self, layers: "Layers", name: str):
        self._layers = layers
        self._name = name

    def __eq__(self, other: object) -> bool:
        return type(other) is _Scope and other._layers is self._layers

    def __hash__(self) -> int:
        return hash(self._layers)

    @contextlib.contextmanager
    def __call__(self, *_: Any) -> Iterator[Callable[[Any], None]]:
        with jax.named_scope(self._name):
            yield lambda output: None


class Layers:
    """The Modules of a call. Each puts its number in the scope of the operations that it makes."""

    def __init__(self, function: Callable[..., Any], arguments: dict[str, Any]):
        self._found: list[tuple[str, str]] = []
        self._inside = _path_inside(function)
        self.function, self.arguments = observe_calls((function, arguments), self._add)

    def _add(self, path: tuple[Any, ...], layer: Module) -> Callable[..., Any]:
        self._found.append((name_of(path), type(layer).__name__))
        return _Scope(self, f"{_SCOPE}{len(self._found) - 1}")

    def name_of(self, path: tuple[Any, ...]) -> str:
        """The name of a leaf: like a layer, it stands under the path of the wrapper around it."""
        whose, *inner = path
        if whose.idx == 0 and tuple(inner[: len(self._inside)]) == self._inside:
            inner = inner[len(self._inside) :]
        return name_of((whose, *inner))

    def at(self, scopes: str) -> tuple[str, str]:
        """The path and the type of the innermost layer in the scopes of an operation."""
        numbers = _IN_SCOPE.findall(scopes)
        return self._found[int(numbers[-1])] if numbers else ("", "")


def _path_inside(function: Any) -> tuple[Any, ...]:
    """The path from a function that was transformed, or bound, to the Module inside."""
    path: tuple[Any, ...] = ()
    while isinstance(function, Wrapper):
        wrapped = (function.__wrapped__, getattr(function, "__self__", None))
        parts = jtu.tree_leaves_with_path(
            function, is_leaf=lambda part, whole=function: part is not whole and _is_module(part)
        )
        inside = [
            (key, part)
            for key, part in parts
            if _is_module(part) and any(part is w for w in wrapped)
        ]
        if not inside:
            break
        path, function = path + inside[0][0], inside[0][1]
    return path


def _is_module(node: Any) -> bool:
    return isinstance(node, Module)


def name_of(path: tuple[Any, ...]) -> str:
    """The name of a place in the pair of a function and its arguments by name."""
    whose, *inner = path
    if whose.idx == 0:
        return f"model{jtu.keystr(tuple(inner))}"
    return f"{inner[0].key}{jtu.keystr(tuple(inner[1:]))}"


def arguments_by_name(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[dict[str, Any], Callable[[dict[str, Any]], tuple[tuple[Any, ...], dict[str, Any]]]]:
    """The arguments under the names of their parameters, and the way back."""
    try:
        bound = inspect.signature(function).bind(*args, **kwargs)
    except (TypeError, ValueError):
        # No signature, or a call that does not fit it, of which Python will say so.
        return {"args": args, "kwargs": kwargs}, lambda named: (named["args"], named["kwargs"])

    def back(named: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        # In the order of the parameters: a tree of a dict comes back in that of the names.
        ordered = {name: named[name] for name in bound.arguments}
        again = inspect.BoundArguments(bound.signature, ordered)  # pyright: ignore
        return again.args, again.kwargs

    return dict(bound.arguments), back


def source_of(equation: Any) -> str:
    """The line in the user's program, or in a layer of ours, that made an operation; or `""`.

    In a function that JAX keeps traced, as those of `jax.numpy`, there may be none.
    """
    traceback = equation.source_info.traceback
    for frame in () if traceback is None else traceback.frames:
        if not frame.file_name.startswith(_MACHINERY):
            return f"{frame.file_name}:{frame.line_num} in {frame.function_name}"
    return ""
