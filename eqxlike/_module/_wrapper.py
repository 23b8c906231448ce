"""The metadata of Modules that wrap a callable: `functools.update_wrapper` for Modules.

Most wrappers read the metadata from the callable that their `__wrapped__` returns. But
`module_update_wrapper` stores the metadata in the `__dict__` of the instance, under `METADATA_KEY`.
When the instance is flattened, the metadata is in the static part.
"""

import copy
import dataclasses
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from ._cached import stored_fields
from ._codec import METADATA_KEY, carries_metadata
from ._field import found_in_class
from ._module import METADATA, Module

_P = ParamSpec("_P")
_T = TypeVar("_T")


def module_update_wrapper(
    wrapper: Module, wrapped: Callable[_P, _T] | None = None
) -> Callable[_P, _T]:
    """Returns a copy of a Module that shows the name and documentation of the callable it wraps.

    **Arguments:**

    - `wrapper`: an instance of a class whose property `__wrapped__` returns the wrapped callable.
    - `wrapped`: the callable whose metadata to show; by default `wrapper.__wrapped__`.

    **Returns:** a copy of `wrapper` with the `__module__`, `__name__`, `__qualname__`, `__doc__`
    and `__annotations__` of `wrapped`, if it has them. These attributes are not leaves of the copy.
    `jax.tree.map` and transformations preserve them.

    **Raises:** `ValueError` if the class of `wrapper` has no property `__wrapped__`.

    !!! example

        >>> import eqxlike as eqx
        >>> from collections.abc import Callable
        >>> class Twice(eqx.Module):
        ...     function: Callable
        ...     def __call__(self, x):
        ...         return self.function(self.function(x))
        ...     @property
        ...     def __wrapped__(self):
        ...         return self.function
        >>> def increment(x):
        ...     return x + 1
        >>> twice = eqx.module_update_wrapper(Twice(increment))
        >>> twice.__name__, twice(3)
        ('increment', 5)
    """
    cls: Any = type(wrapper)
    if not carries_metadata(cls):
        raise ValueError(
            f"`module_update_wrapper` expects a Module whose class has a property `__wrapped__` "
            f"that returns the wrapped callable; {cls.__name__} has none. Write\n"
            "    @property\n"
            "    def __wrapped__(self):\n"
            "        return self.<field>"
        )
    described: Any = wrapper.__wrapped__ if wrapped is None else wrapped  # pyright: ignore
    copied: Any = copy.copy(wrapper)
    # A property of the class would hide a stored value of the same name, so it is left out.
    shown = {
        name: value
        for name, value in shown_by(described).items()
        if not hasattr(found_in_class(cls, name), "__set__")
    }
    make_metadata(shown).write(stored_fields(copied))
    return copied


def shown_by(described: Any) -> dict[str, Any]:
    """The metadata of a callable, by name."""
    return {name: getattr(described, name) for name in METADATA if hasattr(described, name)}


_ANNOTATIONS = "__annotations__"


def make_metadata(shown: dict[str, Any]) -> "Metadata":
    """Converts the metadata `shown` to a hashable object, which can be part of a structure."""
    annotations = shown.get(_ANNOTATIONS)
    if annotations is not None:
        annotations = tuple((name, _hashable(value)) for name, value in annotations.items())
    names = sorted(shown.keys() - {_ANNOTATIONS})
    return Metadata(tuple((name, _hashable(shown[name])) for name in names), annotations)


@dataclasses.dataclass(frozen=True)
class Metadata:
    """The metadata that `module_update_wrapper` gave to an instance.

    The metadata is part of the structure of the tree, so it must be hashable. Therefore annotations
    are stored as pairs, and an unhashable value is compared by identity.
    """

    named: tuple[tuple[str, Any], ...]
    annotations: tuple[tuple[str, Any], ...] | None

    def write(self, fields: dict[str, Any]) -> None:
        """Adds the metadata to `fields`, the `__dict__` of an instance."""
        fields[METADATA_KEY] = self
        fields.update((name, _plain(value)) for name, value in self.named)
        if self.annotations is not None:
            fields[_ANNOTATIONS] = {name: _plain(value) for name, value in self.annotations}


class _Itself:
    """A hashable wrapper of an unhashable value. It equals wrappers of the same object."""

    __slots__ = ("value",)

    def __init__(self, value: Any):
        self.value = value

    def __eq__(self, other: object) -> bool:
        return type(other) is _Itself and other.value is self.value

    def __hash__(self) -> int:
        return id(self.value)


def _hashable(value: Any) -> Any:
    try:
        hash(value)
    except TypeError:
        return _Itself(value)
    return value


def _plain(value: Any) -> Any:
    return value.value if type(value) is _Itself else value
