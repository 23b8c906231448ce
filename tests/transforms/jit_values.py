"""Values that Python calls equal, or that change in place, and a text that tells them apart."""

import collections
import dataclasses
import enum
import functools

from eqxlike import Module, field, is_array


class Pair(Module):
    left: object
    right: object = None
    mode: object = field(static=True, default="a")


Point = collections.namedtuple("Point", ["x", "y"])


class Colour(enum.Enum):
    RED = 1
    GREEN = 2


class Rank(enum.IntEnum):
    FIRST = 1


@dataclasses.dataclass(frozen=True)
class Config:
    size: object


class InheritedConfig(Config):
    pass


class Holder:
    """Hashes by identity, and changes in place."""

    def __init__(self, value):
        self.value = value

    def get(self):
        return self.value

    def __call__(self):
        return describe(self.value)


class Slotted:
    __slots__ = ("value",)

    def __init__(self, value):
        self.value = value


class PrivatelySlotted:
    __slots__ = ("__value",)

    def __init__(self, value):
        self.__value = value

    def set(self, value):
        self.__value = value

    def get(self):
        return self.__value


def describe(value):
    """A text that tells apart what Python can tell apart."""
    if isinstance(value, functools.partial):
        return f"partial({describe((value.func, value.args, value.keywords))})"
    if isinstance(value, Holder | Slotted):
        return f"{type(value).__name__}({describe(value.value)})"
    if isinstance(value, PrivatelySlotted):
        return f"PrivatelySlotted({describe(value.get())})"
    if isinstance(value, dict):
        return f"{type(value).__name__}{[(key, describe(each)) for key, each in value.items()]}"
    if isinstance(value, tuple | list | collections.deque):
        return f"{type(value).__name__}{[*map(describe, value)]}"
    if isinstance(value, Config):
        return f"{type(value).__name__}({describe(value.size)})"
    if callable(value) and hasattr(value, "__self__") and not isinstance(value, type(len)):
        return f"method of {describe(value.__self__)}"
    return f"{type(value).__name__} {value!r}"


def describe_all(tree):
    if isinstance(tree, Pair):
        return describe_all(tree.left), describe_all(tree.right), describe(tree.mode)
    return describe(tree) if not is_array(tree) else "array"
