"""Arrays held by a plain object that is an argument, such as the instance of a compiled method.

The object is static and compared by identity, as for `jax.jit`. Its arrays became constants when
the function was traced. If an attribute holds another array later, the call warns, once: the
compiled function still has the old one.
"""

import warnings
from collections.abc import Iterable
from typing import Any, NamedTuple

from ..._module import Module
from ..._pytree import is_array
from ..._traceback import stacklevel_of_user


class _Watched(NamedTuple):
    """An attribute that held an array."""

    holder: Any
    attributes: dict[str, Any]
    name: str
    array: Any

    def is_current(self) -> bool:
        return self.attributes.get(self.name) is self.array


class WatchedArrays:
    """The arrays among the attributes of static arguments, as they were when this was made.

    **Arguments:**

    - `name`: the name of the function that is traced.
    - `static`: its static arguments.
    """

    def __init__(self, name: str, static: Iterable[Any]):
        self._name = name
        self._watched = [
            _Watched(each, attributes, attribute, value)
            for each in static
            if not isinstance(each, Module | type)
            and type(attributes := getattr(each, "__dict__", None)) is dict
            for attribute, value in attributes.items()
            if is_array(value)
        ]

    def __bool__(self) -> bool:
        return bool(self._watched)

    def are_current(self) -> bool:
        """Whether all attributes still hold these arrays."""
        # This runs at each call: a loop takes half the time of `all`.
        for _, attributes, name, array in self._watched:  # noqa: SIM110
            if attributes.get(name) is not array:
                return False
        return True

    def warn_of_changes(self) -> None:
        """Warns of each attribute that no longer holds its array, once."""
        changed = [each for each in self._watched if not each.is_current()]
        if changed:
            self._watched = [each for each in self._watched if each.is_current()]
        for watched in changed:
            type_name = type(watched.holder).__name__
            warnings.warn(
                f"`{type_name}.{watched.name}` held an array when `{self._name}` was traced, and "
                f"has been assigned since. A {type_name} is no Module: it is static, by identity, "
                "and what was compiled still has the old array. Make it an `eqxlike.Module`, or "
                "pass the array as an argument.",
                stacklevel=stacklevel_of_user(),
            )
