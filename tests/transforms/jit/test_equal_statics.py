"""Static values that are equal and not the same are told apart."""

import functools
import itertools
import math

import equinox
import jax.numpy as jnp
import numpy as np

from eqxlike import Module, filter_jit, is_array
from tests.partition.statics import Named
from tests.transforms.jit.traced import Traced
from tests.transforms.jit.values import (
    Colour,
    Config,
    InheritedConfig,
    Pair,
    Point,
    Rank,
    describe,
    describe_all,
)

ROWS = {
    "numbers": [1, 1.0, True, 1 + 0j],
    "zeros": [0, 0.0, -0.0, False, complex(0.0, -0.0)],
    "not-numbers": [float("nan"), float("inf"), float("-inf")],
    "text": ["1", b"1", 1],
    "enums": [Colour.RED, Colour.GREEN, Rank.FIRST, 1],
    "tuples": [(1,), (1.0,), (True,), ((1,),)],
    "zeros-in-tuples": [(0.0,), (-0.0,), (0,)],
    "namedtuples": [Point(1, 0.0), Point(1, -0.0), Point(True, 0.0)],
    "dataclasses": [Config(1), Config(1.0), Config(True)],
    "subclasses-of-dataclasses": [InheritedConfig(1), InheritedConfig(1.0), Config(1)],
    "partials": [functools.partial(max, 1), functools.partial(max, 1.0)],
    "empty": [None, (), False, 0, ""],
}
WAYS = {
    "argument": lambda jitted, value: jitted(value),
    "keyword": lambda jitted, value: jitted(value=value),
    "field": lambda jitted, value: jitted(Pair(1, value)),
    "static-field": lambda jitted, value: jitted(Pair(1, mode=value)),
    "list": lambda jitted, value: jitted([value]),
    "dict": lambda jitted, value: jitted({"a": value}),
    "tuple-of-static-field": lambda jitted, value: jitted(Pair(1, mode=(value,))),
}


def assert_told_apart(row, way):
    def plain(value):
        return describe_all(value)

    traced = Traced(plain)
    for value in ROWS[row] * 2:
        assert WAYS[way](traced, value) == WAYS[way](plain, value)
    assert traced.count == len(ROWS[row])


def test_equal_statics_are_told_apart():
    for row, way in zip(ROWS, itertools.cycle(WAYS), strict=False):
        assert_told_apart(row, way)
    # Zeros wherever they are.
    for way in [*WAYS][2:]:
        assert_told_apart("zeros", way)


def test_equal_statics_bound_to_a_callable_are_told_apart():
    class Describes(Module):
        value: object

        def __call__(self):
            return describe(self.value)

    for value in [*ROWS["numbers"][1:], *ROWS["zeros-in-tuples"][:2]]:
        assert filter_jit(functools.partial(describe, value))() == describe(value)
        assert filter_jit(Describes(value))() == describe(value)


def test_numpy_zeros_in_a_static_tuple_are_told_apart():
    jitted = filter_jit(lambda module: math.copysign(1.0, module.mode[0]))
    signs = [jitted(Pair(1, mode=(np.float64(zero),))) for zero in (0.0, -0.0)]
    assert signs == [1.0, -1.0]


def test_dict_keys_that_are_equal_are_told_apart():
    jitted = filter_jit(lambda tree: [type(key).__name__ for key in tree])
    assert [jitted({key: "a"}) for key in (1, True, 1.0)] == [["int"], ["bool"], ["float"]]


def test_static_leaf_in_place_of_an_array_is_told_apart():
    jitted = filter_jit(lambda module: is_array(module.left))
    assert [jitted(Pair(value)) for value in (1.0, jnp.array(1.0), np.float32(1), 1.0)] == [
        False,
        True,
        True,
        False,
    ]


def test_own_equality_tells_numbers_among_attributes_by_type_no_deeper():
    jitted = filter_jit(lambda named: describe(named.name))
    assert [jitted(Named(number)) for number in (1, True)] == ["int 1", "bool True"]
    # In an object further in `True` is taken for the equal 1, as everywhere in Equinox.
    assert [jitted(Named(Config(number))) for number in (1, True)] == ["Config(int 1)"] * 2
    theirs = equinox.filter_jit(lambda named: describe(named.name))
    assert [theirs(Named(number)) for number in (1, True)] == ["int 1"] * 2
