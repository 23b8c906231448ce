"""Tables that live as long as a function, and may hold it: they are in its `__dict__`."""

import weakref
from collections.abc import Callable
from types import FunctionType
from typing import Any


class _Attachment:
    """A value in the `__dict__` of a function, which knows the function that owns it.

    `functools.wraps` copies the `__dict__`, and so do tools that pickle functions by value. A copy
    in another function does not belong to it, and a pickled one belongs to none.
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
    """The value attached to `function` under `name`; `make` makes it the first time.

    A `WeakKeyDictionary` of functions will not do: a value that holds its key would keep both for
    good. A function that is in a cycle with its own `__dict__` is garbage like any other.
    """
    found = vars(function).get(name)
    if found is None or not found.belongs_to(function):
        found = vars(function)[name] = _Attachment(function, make())
    return found.value
