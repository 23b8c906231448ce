"""Short texts for what is static: values, functions, and places in files."""

import contextlib
import functools
import os
import reprlib
import types
from typing import Any

from ...._pytree import is_array

LONGEST = 200
"""At most this many characters of a value are kept."""

_MOST_WRAPPERS = 8
"""A function is looked for inside of at most so many others: `jax.nn.relu` is in two."""

_short_repr = reprlib.Repr()
_short_repr.maxlevel = 3
_short_repr.maxlist = _short_repr.maxtuple = _short_repr.maxdict = 32
_short_repr.maxset = _short_repr.maxfrozenset = 32
_short_repr.maxstring = _short_repr.maxother = _short_repr.maxlong = LONGEST


def describe_static(value: Any) -> str:
    """A short text for a static value. Nothing that its own `__repr__` does can fail."""
    try:
        return _shorten(_describe(value))
    except Exception:
        return f"<{type(value).__name__}>"


def _describe(value: Any) -> str:
    function = function_of(value)
    if function is not None:
        return describe_function(function)
    if isinstance(value, types.MethodType):
        return f"the method {value.__func__.__qualname__} of a {type(value.__self__).__name__}"
    if isinstance(value, type):
        return value.__qualname__
    if isinstance(value, functools.partial):
        return f"a partial of {describe_static(value.func)}"
    if _holds_array(value):
        return f"a {type(value).__name__}"
    return _short_repr.repr(value)


def _holds_array(value: Any) -> bool:
    """Whether the `repr` of a value may show an array, for which JAX would wait."""
    of_class = getattr(value, "__dict__", None)
    return type(of_class) is dict and any(map(is_array, of_class.values()))


def function_of(value: Any) -> types.FunctionType | None:
    """The function that a value is, or of which JAX has made it."""
    with contextlib.suppress(Exception):
        for _ in range(_MOST_WRAPPERS):
            if isinstance(value, types.FunctionType):
                return value
            value = None if isinstance(value, type) else getattr(value, "__wrapped__", None)
    return None


def describe_function(function: types.FunctionType) -> str:
    """A function by its name, and the place where it is defined, or the package."""
    code = function.__code__
    name = function.__qualname__.rpartition("<locals>.")[2]
    if "site-packages" in code.co_filename:
        return f"{name} ({function.__module__.partition('.')[0]})"
    return f"{name} ({show_place(code.co_filename, code.co_firstlineno)})"


def show_place(file: str, line: int) -> str:
    """A file and a line; the file as seen from the current directory, if it is below that."""
    folder = os.path.join(os.getcwd(), "")
    return f"{file.removeprefix(folder)}:{line}"


def _shorten(text: str) -> str:
    return text if len(text) <= LONGEST else text[:LONGEST] + "..."
