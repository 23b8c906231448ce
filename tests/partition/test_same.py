"""Static values are one to a trace where `filter_jit` would take the trace of one for the other."""

import functools
import itertools

import jax
import numpy as np
import pytest

import eqxlike as eqx
from eqxlike import nn
from eqxlike._partition import find_static_difference, is_same_static


class Unhashable:
    __hash__ = None

    def __init__(self, value):
        self.value = value

    def __eq__(self, other):
        return self.value == other.value


UNHASHABLE = Unhashable(1)

VALUES = [
    0,
    False,
    0.0,
    -0.0,
    float("nan"),
    "0",
    b"0",
    None,
    (0,),
    (False,),
    np.dtype("float32"),
    jax.nn.relu,
    jax.nn.tanh,
    lambda x: x,
    lambda x: x + 0,
    functools.partial(jax.nn.leaky_relu, negative_slope=0.1),
    functools.partial(jax.nn.leaky_relu, negative_slope=0.2),
]


@pytest.mark.parametrize("values", [VALUES, VALUES[::-1]], ids=["in-order", "reversed"])
def test_two_values_are_the_same_where_filter_jit_traces_once(values):
    traces = itertools.count()
    trace_of = eqx.filter_jit(lambda value: next(traces))
    numbers = [trace_of(value) for value in values]
    assert numbers == [trace_of(value) for value in values]
    numbered = itertools.product(zip(values, numbers, strict=True), repeat=2)
    disagree = [
        (first, second)
        for (first, one), (second, other) in numbered
        if is_same_static(first, second) != (one == other)
    ]
    assert disagree == []


def test_equal_partials_are_the_same():
    assert is_same_static(functools.partial(max, 1), functools.partial(max, 1))


def test_what_is_not_hashable_is_told_apart_by_identity():
    assert is_same_static(UNHASHABLE, UNHASHABLE)
    assert not is_same_static(UNHASHABLE, Unhashable(1))


def model(activation=jax.nn.relu, size=3, scale=1.0):
    keys = jax.random.split(jax.random.key(size), 2)
    layers = [nn.Linear(size, size, key=keys[0]), {"activation": activation, "scale": scale}]
    return nn.Sequential(layers)


def test_trees_that_differ_in_arrays_alone_have_no_difference():
    other = jax.tree.map(lambda leaf: leaf + 1 if eqx.is_array(leaf) else leaf, model())
    assert find_static_difference(model(), other) is None
    assert find_static_difference(model(), nn.freeze(model())) is not None


@pytest.mark.parametrize(
    ("other", "path", "first", "second"),
    [
        (model(jax.nn.tanh), ".layers[1]['activation']", jax.nn.relu, jax.nn.tanh),
        (model(scale=1), ".layers[1]['scale']", 1.0, 1),
        (nn.Sequential([]), ".layers", model().layers, ()),
        ("leaf", "", model(), "leaf"),
    ],
)
def test_difference_is_found_where_it_stands(other, path, first, second):
    found = find_static_difference(model(), other)
    assert jax.tree_util.keystr(found.path) == path
    assert eqx.tree_equal((found.first, found.second), (first, second), typematch=True)


def test_difference_in_static_fields_is_one_of_the_module():
    found = find_static_difference(model(), model(size=4))
    assert jax.tree_util.keystr(found.path) == ".layers[0]"
    assert (found.first.in_features, found.second.in_features) == (3, 4)
