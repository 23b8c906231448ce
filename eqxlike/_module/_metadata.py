"""The metadata of callables (name, docstring and the like), and of Modules that wrap them."""

import dataclasses
import sys
from typing import Any

METADATA = frozenset({"__name__", "__qualname__", "__doc__", "__module__", "__annotations__"})


_ANNOTATIONS = "__annotations__"


_OWN = "_eqxlike_metadata"
"""The `__dict__` of an instance has its own metadata, if any, under this name."""


@dataclasses.dataclass(frozen=True)
class Metadata:
    """The metadata that `module_update_wrapper` gave to an instance.

    It is part of the structure of the tree, and so hashable: the annotations are pairs, and a value
    that is not hashable is compared by identity.
    """

    named: tuple[tuple[str, Any], ...]
    annotations: tuple[tuple[str, Any], ...] | None


class _Itself:
    """A hashable stand-in for a value that is not; two are equal if they hold the same object."""

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


def has_metadata(fields: dict[str, Any]) -> bool:
    """Whether the instance with these `fields`, its `__dict__`, has metadata of its own."""
    return _OWN in fields


def shown_by(described: Any) -> dict[str, Any]:
    """The metadata of a callable, by name."""
    return {name: getattr(described, name) for name in METADATA if hasattr(described, name)}


def make_metadata(shown: dict[str, Any]) -> Metadata:
    """The metadata `shown`, in a form that can be part of a structure."""
    annotations = shown.get(_ANNOTATIONS)
    if annotations is not None:
        annotations = tuple((name, _hashable(value)) for name, value in annotations.items())
    names = sorted(shown.keys() - {_ANNOTATIONS})
    return Metadata(tuple((name, _hashable(shown[name])) for name in names), annotations)


def read_metadata(fields: dict[str, Any]) -> Metadata | None:
    return fields.get(_OWN)


def write_metadata(metadata: Metadata | None, fields: dict[str, Any]) -> None:
    if metadata is not None:
        fields[_OWN] = metadata
        fields.update((name, _plain(value)) for name, value in metadata.named)
        if metadata.annotations is not None:
            fields[_ANNOTATIONS] = {name: _plain(value) for name, value in metadata.annotations}


def carries_metadata(cls: Any) -> bool:
    """Whether instances of `cls` may have metadata of their own, which a map preserves."""
    return isinstance(getattr(cls, "__wrapped__", None), property)


def is_found_by_name(described: Any) -> bool:
    """Whether the module of `described` has it under its qualified name.

    Nothing in `__main__` counts, which is another module in another process.
    """
    module = getattr(described, "__module__", None)
    found = None if module == "__main__" else sys.modules.get(module or "")
    for name in getattr(described, "__qualname__", "").split("."):
        found = getattr(found, name, None)
    return found is described
