"""`closure_to_pytree`: converts functions to Modules whose children are the closed-over values."""

import types
from typing import Any

import jax.tree_util as jtu
from jaxtyping import PyTree

from .. import Module


class _Code:
    """A function without its closure, compared by its code, defaults and globals."""

    def __init__(self, function: types.FunctionType):
        self._function = function

    def _parts(self) -> tuple[Any, ...]:
        function = self._function
        keywords = function.__kwdefaults__ or {}
        identities = [*(function.__defaults__ or ()), *keywords.values(), function.__globals__]
        return (
            function.__code__,
            function.__qualname__,
            len(function.__defaults__ or ()),
            tuple(keywords),
            tuple(map(id, identities)),
        )

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Code) and self._parts() == other._parts()

    def __hash__(self) -> int:
        return hash(self._function.__code__)

    def __repr__(self) -> str:
        return repr(self._function)

    def with_closure(self, contents: tuple[Any, ...]) -> types.FunctionType:
        """Returns the function with `contents` as its closure."""
        function = self._function
        cells = tuple(map(types.CellType, contents))
        rebuilt = types.FunctionType(
            function.__code__, function.__globals__, function.__name__, function.__defaults__, cells
        )
        rebuilt.__kwdefaults__ = function.__kwdefaults__
        return rebuilt


class _Closure(Module):
    """A function whose children are the values it closes over."""

    fn: _Code
    contents: tuple[Any, ...] | None

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        return self.fn.with_closure(self.contents or ())(*args, **kwargs)


def closure_to_pytree(tree: PyTree) -> PyTree:
    """Replaces each function in a tree by a Module whose children are the values it closes over.

    JAX then sees the arrays in closures. If a function that returns a function is called twice, the
    two results have equal tree structures. Optax makes its optimisers by calling such functions.
    Global variables do not become children.

    **Arguments:**

    - `tree`: any pytree, or a function.

    **Raises:** `ValueError` if a function closes over itself, or over a variable that has no value.

    !!! example

        >>> import jax
        >>> def scaling_by(factor):
        ...     return lambda x: factor * x
        >>> scale = closure_to_pytree(scaling_by(2.0))
        >>> jax.tree.map(lambda leaf: 3 * leaf if leaf == 2.0 else leaf, scale)(1.0)
        6.0
    """
    return _convert(tree, ())


def _convert(tree: PyTree, around: tuple[Any, ...]) -> PyTree:
    def convert(leaf: Any) -> Any:
        if not isinstance(leaf, types.FunctionType):
            return leaf
        if leaf in around:
            raise ValueError(
                f"closure_to_pytree cannot convert {leaf.__qualname__}, which closes over itself. "
                "Pass the function to itself as an argument."
            )
        if leaf.__closure__ is None:
            return _Closure(_Code(leaf), None)
        contents = tuple(
            _convert(_contents(leaf, number), (*around, leaf))
            for number in range(len(leaf.__closure__))
        )
        return _Closure(_Code(leaf), contents)

    return jtu.tree_map(convert, tree)


def _contents(function: types.FunctionType, number: int) -> Any:
    try:
        return (function.__closure__ or ())[number].cell_contents
    except ValueError:
        name = function.__code__.co_freevars[number]
        raise ValueError(
            f"closure_to_pytree cannot convert {function.__qualname__}, which closes over "
            f"`{name}`: this variable has no value yet."
        ) from None
