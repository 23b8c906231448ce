"""Tables that live as long as a function, and may hold it: they are in its `__dict__`."""

import weakref
from collections.abc import Callable
from types import FunctionType
from typing import Any


def attached(function: FunctionType, name: str, make: Callable[[], Any]) -> Any:
    """What is attached to `function` under `name`; made if nothing is.

    Not a `WeakKeyDictionary` of functions: a value that holds its key would keep both for good. A
    function that is in a cycle with its own `__dict__` is garbage like any other.
    """
    owner, value = vars(function).get(name, (None, None))
    # `functools.wraps` copies the `__dict__`: what is in it belongs to the function that it names.
    if owner is None or owner() is not function:
        owner, value = vars(function)[name] = (weakref.ref(function), make())
    return value
