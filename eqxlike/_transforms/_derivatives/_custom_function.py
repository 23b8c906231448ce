"""The common base of functions with derivatives of their own."""

import functools
from collections.abc import Callable
from typing import Any

import jax

from ..._module import bind
from .._wrapping import check_callable


class CustomFunction:
    """The base of functions with a derivative of their own, which is set once they are made.

    So they are no Modules. They are copied and pickled as functions are: by name.
    """

    __name__: str
    __wrapped__: Callable[..., Any]

    def __init__(self, fn: Callable[..., Any]):
        check_callable(fn, type(self).__name__)
        functools.update_wrapper(self, fn, updated=())  # pyright: ignore

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return self if instance is None else bind(self, instance)  # pyright: ignore

    def __reduce__(self) -> str:
        return getattr(self, "__qualname__", repr(self))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.__wrapped__!r})"

    @property
    def _label(self) -> str:
        """The name of the function in messages."""
        return getattr(self, "__name__", repr(self.__wrapped__))

    def _explain(self, error: jax.errors.UnexpectedTracerError) -> None:
        """Adds a note to JAX's error about an unexpected tracer in a call."""
        error.add_note(
            f"This was while {self._label} was called, which has a derivative of its own. It may "
            "be that it, or a function among its arguments, closes over an array that is being "
            "differentiated. The derivative does not know of such an array: pass it as an "
            "argument, or make it part of one with `eqxlike.filter_closure_convert`."
        )
