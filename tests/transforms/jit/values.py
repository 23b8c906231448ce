"""Values that Python calls equal, and a text that tells them apart."""

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


def describe(value):
    """A text that tells apart what Python can tell apart."""
    if isinstance(value, functools.partial):
        return f"partial({describe((value.func, value.args, value.keywords))})"
    if isinstance(value, dict):
        return f"{type(value).__name__}{[(key, describe(each)) for key, each in value.items()]}"
    if isinstance(value, tuple | list):
        return f"{type(value).__name__}{[*map(describe, value)]}"
    if isinstance(value, Config):
        return f"{type(value).__name__}({describe(value.size)})"
    return f"{type(value).__name__} {value!r}"


def describe_all(tree):
    if isinstance(tree, Pair):
        return describe_all(tree.left), describe_all(tree.right), describe(tree.mode)
    return describe(tree) if not is_array(tree) else "array"
