"""What a callable says of itself, and Modules that repeat it for what they wrap."""

import dataclasses
import sys
from typing import Any

METADATA = frozenset({"__name__", "__qualname__", "__doc__", "__module__", "__annotations__"})


_ANNOTATIONS = "__annotations__"


_OWN = "_eqxlike_metadata"
"""Under this name, in the `__dict__` of an instance, is the metadata that it has of its own."""


@dataclasses.dataclass(frozen=True)
class Metadata:
    """What an instance was told to say of itself.

    It is part of the structure of the tree, and so hashable: the annotations are pairs, and a value
    that is not hashable is itself and nothing else.
    """

    named: tuple[tuple[str, Any], ...]
    annotations: tuple[tuple[str, Any], ...] | None


class _Itself:
    """Stands for a value that is not hashable, and is equal to what stands for the same one."""

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
    """What a callable says of itself, by name."""
    return {name: getattr(described, name) for name in METADATA if hasattr(described, name)}


def make_metadata(shown: dict[str, Any]) -> Metadata:
    """What is `shown`, so that it may be part of a structure."""
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
    """Whether instances of `cls` may have metadata of their own, and keep it in a map."""
    return isinstance(getattr(cls, "__wrapped__", None), property)


def is_found_by_name(described: Any) -> bool:
    """Whether a module has `described` under the name that this says it has.

    Not of `__main__`, which is another module in another process.
    """
    module = getattr(described, "__module__", None)
    found = None if module == "__main__" else sys.modules.get(module or "")
    for name in getattr(described, "__qualname__", "").split("."):
        found = getattr(found, name, None)
    return found is described
