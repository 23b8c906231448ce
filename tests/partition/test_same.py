"""Static values are one to a trace where `filter_jit` would take the trace of one for the other."""

import functools

import jax
import numpy as np
import pytest

import eqxlike as eqx
from eqxlike._partition._same import is_same_static


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


def num_traces(*values):
    traced = []

    @eqx.filter_jit
    def function(value):
        traced.append(value)

    for value in values:
        function(value)
    return len(traced)


@pytest.mark.parametrize("second", VALUES)
def test_two_values_are_the_same_where_filter_jit_traces_once(second):
    for first in VALUES:
        assert is_same_static(first, second) == (num_traces(first, second) == 1)


def test_equal_partials_are_the_same():
    assert is_same_static(functools.partial(max, 1), functools.partial(max, 1))


def test_what_is_not_hashable_is_told_apart_by_identity():
    assert is_same_static(UNHASHABLE, UNHASHABLE)
    assert not is_same_static(UNHASHABLE, Unhashable(1))
