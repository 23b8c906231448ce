"""Tables that live as long as a function, and may hold it: they are in its `__dict__`."""

import weakref
from collections.abc import Callable
from types import FunctionType
from typing import Any


class _Attachment:
    """What is in the `__dict__`. `functools.wraps` copies that, and tools that pickle functions by
    value do too: it belongs to the function that it names alone, and a pickled one to none.
    """

    __slots__ = ("owner", "value")

    def __init__(self, owner: FunctionType | None = None, value: Any = None):
        self.owner = None if owner is None else weakref.ref(owner)
        self.value = value

    def belongs_to(self, function: FunctionType) -> bool:
        return self.owner is not None and self.owner() is function

    def __reduce__(self) -> tuple[Any, ...]:
        return _Attachment, ()


def attached(function: FunctionType, name: str, make: Callable[[], Any]) -> Any:
    """What is attached to `function` under `name`; made if nothing is.

    Not a `WeakKeyDictionary` of functions: a value that holds its key would keep both for good. A
    function that is in a cycle with its own `__dict__` is garbage like any other.
    """
    found = vars(function).get(name)
    if found is None or not found.belongs_to(function):
        found = vars(function)[name] = _Attachment(function, make())
    return found.value
