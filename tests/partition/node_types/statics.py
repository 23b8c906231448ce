"""Static leaves, those first that Python calls equal."""

import dataclasses
import enum
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from tests.partition.node_types.foreign import Struct, nnx_model
from tests.partition.node_types.kind import Kind, Shown, text, twice
from tests.partition.node_types.modules import Box


class Colour(enum.Enum):
    RED = 1
    GREEN = 2


class Rank(enum.IntEnum):
    FIRST = 1


class Flag(enum.Flag):
    A = 1
    B = 2


@dataclasses.dataclass(unsafe_hash=True)
class Hashed(Shown):
    size: Any


@dataclasses.dataclass(frozen=True)
class Frozen(Shown):
    """Hashable, although a field is not; as `nnx.GraphDef`."""

    sizes: list
    name: Any

    def __hash__(self):
        return hash(self.name)


class Held(Shown):
    """Itself and nothing else."""

    def __init__(self, value):
        self.value = value

    def get(self):
        return self.value


class OwnEqual:
    """Compared by a number, whatever its type."""

    def __init__(self, value):
        self.value = value

    def __eq__(self, other):
        return isinstance(other, OwnEqual) and self.value == other.value

    def __hash__(self):
        return hash(self.value)


def first_function():
    return 1


def second_function():
    return 2


def set_size(value):
    value.size = text(value.size)


def call(function):
    return text(function())


ONES = (1, 1.0, True, 1 + 0j, Rank.FIRST, "1", b"1")
ZEROS = (0, 0.0, -0.0, False, 0j, -0j, "", b"", ())

STATICS = {
    "ones": Kind(lambda: [*ONES]),
    "zeros": Kind(lambda: [*ZEROS]),
    "nans": Kind(lambda: [float("nan"), -float("nan"), float("nan"), complex(0, float("nan"))]),
    "infinities": Kind(lambda: [float("inf"), -float("inf")]),
    "strings": Kind(lambda: ["a", "b"]),
    "none-and-ellipsis": Kind(lambda: [None, ..., NotImplemented], text),
    "enums": Kind(lambda: [Colour.RED, Colour.GREEN, Flag.A, Flag.A | Flag.B]),
    "types": Kind(lambda: [int, bool, Box, Struct]),
    "dtypes": Kind(lambda: [np.dtype("float32"), np.dtype("int32"), jnp.float32, jnp.bfloat16]),
    "frozensets": Kind(lambda: [frozenset({1}), frozenset({1.0}), frozenset({True})]),
    "ranges": Kind(lambda: [range(1), range(2)]),
    "functions": Kind(lambda: [first_function, second_function], call),
    "lambdas": Kind(lambda: [lambda n=n: n for n in (1, 1.0)], call),
    "jitted": Kind(
        lambda: [jax.jit(first_function), jax.jit(second_function)], lambda function: function()
    ),
    "builtins": Kind(lambda: [len, max]),
    "partials": Kind(
        lambda: [functools.partial(text, n) for n in (1, 1.0, True)],
        call,
    ),
    "partials-with-keywords": Kind(
        lambda: [functools.partial(dict, a=n) for n in (1, 1.0)],
        call,
        lambda partial: partial.keywords.update(b="more"),
    ),
    "partials-of-lists": Kind(
        lambda: [functools.partial(list, [n]) for n in (1, 1.0)],
        call,
        lambda partial: partial.args[0].append("more"),
    ),
    "partials-of-modules": Kind(twice(lambda n: functools.partial(text, Box({"a": n}))), call),
    "objects": Kind(lambda: [Held(1), Held(1), Held([1])]),
    "methods-of-objects": Kind(lambda: [Held(1).get, Held(1.0).get], call),
    "own-equal": Kind(lambda: [OwnEqual(n) for n in (1, 1.0, True)], lambda it: text(it.value)),
    "unsafe-hash": Kind(lambda: [Hashed(n) for n in (1, 1.0, True)], mutate=set_size),
    "unsafe-hash-in-unsafe-hash": Kind(lambda: [Hashed(Hashed(n)) for n in (1, 1.0, True)]),
    "own-hash-with-list": Kind(
        lambda: [Frozen([n], "a") for n in (1, 1.0, True, 2)],
        mutate=lambda value: value.sizes.append("more"),
    ),
    "nnx-graph": Kind(
        lambda: [nnx_model(n)[0] for n in (1, 2)],
        lambda graph: text(nnx.merge(graph, nnx_model(1)[1]).rate),
    ),
}
