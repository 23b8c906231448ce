"""What several of the tests beside it take."""

import collections

from eqxlike import Module, field
from eqxlike._partition import flatten


class Pair(Module):
    left: object
    right: object = None
    mode: object = field(static=True, default="a")


Point = collections.namedtuple("Point", ["x", "y"])


def flatten_cached(module):
    """The module, once flattened."""
    flatten(module)
    return module
