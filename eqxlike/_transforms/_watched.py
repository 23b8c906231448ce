"""Arrays held by a plain object to which a compiled method is bound.

The object is static: itself, and nothing that it holds, as for `jax.jit`. Its arrays became
constants when the method was traced. Where such an attribute holds another array later, the call
warns, once: the compiled function still has the old one.
"""

import warnings
from typing import Any

from .._module import Module
from .._pytree import is_array


class WatchedArrays:
    """The arrays among the attributes of some objects, as they were at this moment."""

    def __init__(self, name: str, objects: tuple[Any, ...]):
        self._name = name
        self._watched = [
            (each, attributes, attribute, value)
            for each in objects
            if not isinstance(each, Module | type)
            and type(attributes := getattr(each, "__dict__", None)) is dict
            for attribute, value in attributes.items()
            if is_array(value)
        ]

    def __bool__(self) -> bool:
        return bool(self._watched)

    def are_current(self) -> bool:
        """Whether all of them are still there."""
        for _, attributes, attribute, value in self._watched:
            if attributes.get(attribute) is not value:
                return False
        return True

    def warn_of_changes(self) -> None:
        """Warns of those that are not; each of them once."""
        changed = [each for each in self._watched if each[1].get(each[2]) is not each[3]]
        for watched in changed:
            self._watched.remove(watched)
            holder, _, attribute, _ = watched
            kind = type(holder).__name__
            warnings.warn(
                f"`{kind}.{attribute}` held an array when `{self._name}` was traced, and has been "
                f"assigned since. A {kind} is no Module: it is static, by identity, and what was "
                "compiled still has the old array. Make it an `eqxlike.Module`, or pass the array "
                "as an argument.",
                stacklevel=_LEVEL,
            )


_LEVEL = 5
