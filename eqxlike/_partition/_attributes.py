"""The attributes of a value, in its `__dict__` and in the slots of its class."""

import dataclasses
from collections.abc import Hashable, Iterator
from typing import Any

import numpy as np

_NUMBERS = frozenset({bool, int, float, complex})


def types_of_numbers(value: Any) -> Hashable:
    """The types of those attributes of `value` that are numbers, or tuples that hold some."""
    return tuple(
        (name, types)
        for name, each in attributes_of(value)
        if (types := _number_types(each)) is not None
    )


def _number_types(value: Any) -> Hashable:
    if type(value) is tuple:
        inner = tuple(map(_number_types, value))
        return inner if any(each is not None for each in inner) else None
    return type(value) if type(value) in _NUMBERS or isinstance(value, np.generic) else None


def has_attributes(value: Any) -> bool:
    has_some = hasattr(value, "__dict__") or any(map(_slots, type(value).__mro__))
    # A dataclass with slots may have no field.
    return has_some or dataclasses.is_dataclass(value)


def attributes_of(value: Any) -> Iterator[tuple[str, Any]]:
    yield from getattr(value, "__dict__", {}).items()
    for base in type(value).__mro__:
        for slot in _slots(base):
            if hasattr(value, slot):
                yield slot, getattr(value, slot)


def _slots(base: type) -> list[str]:
    slots = vars(base).get("__slots__", ())
    slots = (slots,) if isinstance(slots, str) else slots
    prefix = f"_{base.__name__.lstrip('_')}"
    return [
        f"{prefix}{slot}" if slot.startswith("__") and not slot.endswith("__") else slot
        for slot in slots
        if slot not in ("__dict__", "__weakref__")
    ]
