"""What a callable says of itself, and Modules that repeat it for what they wrap."""

import dataclasses
import sys
from typing import Any

METADATA = frozenset({"__name__", "__qualname__", "__doc__", "__module__", "__annotations__"})


@dataclasses.dataclass(frozen=True)
class Metadata:
    """What stands under these names in the `__dict__` of an instance.

    It is part of the structure of the tree, and so hashable. Annotations need not be; functions
    that differ in these alone are rare, and may stand for each other.
    """

    named: tuple[tuple[str, Any], ...]
    annotations: tuple[dict[str, Any], ...] = dataclasses.field(compare=False)


def has_metadata(fields: dict[str, Any]) -> bool:
    return not METADATA.isdisjoint(fields)


def read_metadata(fields: dict[str, Any]) -> Metadata | None:
    """What of it is among `fields`, the `__dict__` of an instance."""
    names = METADATA.intersection(fields)
    if not names:
        return None
    named = tuple((name, fields[name]) for name in sorted(names - {"__annotations__"}))
    return Metadata(named, tuple(fields[name] for name in names & {"__annotations__"}))


def write_metadata(metadata: Metadata | None, fields: dict[str, Any]) -> None:
    if metadata is not None:
        fields.update(metadata.named)
        fields.update(("__annotations__", each) for each in metadata.annotations)


def carries_metadata(cls: Any) -> bool:
    """Whether instances of `cls` may have metadata of their own, and should keep it in a map."""
    return isinstance(getattr(cls, "__wrapped__", None), property) and not getattr(
        cls, "_eqxlike_is_wrapper", False
    )


def is_found_by_name(described: Any) -> bool:
    """Whether a module has `described` under the name that this says it has.

    Not of `__main__`, which is another module in another process.
    """
    module = getattr(described, "__module__", None)
    found = None if module == "__main__" else sys.modules.get(module or "")
    for name in getattr(described, "__qualname__", "").split("."):
        found = getattr(found, name, None)
    return found is described
