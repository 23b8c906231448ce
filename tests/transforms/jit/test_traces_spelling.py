"""Calls that differ only in spelling are one trace."""

import functools

import jax.numpy as jnp
import numpy as np
import pytest

from eqxlike import Module, filter_grad, filter_jit, filter_value_and_grad
from tests.transforms.jit.traced import Traced


def weigh(a, b=2, /, c=3, *, d=4, e=None):
    return a * b * c * d


SPELLINGS = {
    "by-place": lambda f, x: f(x, 2, 3, d=4, e=None),
    "defaults": lambda f, x: f(x),
    "some-defaults": lambda f, x: f(x, 2),
    "by-keyword": lambda f, x: f(x, c=3),
    "keywords-in-another-order": lambda f, x: f(x, e=None, d=4, c=3),
}


def test_calls_that_differ_only_in_spelling_are_one_trace():
    traced = Traced(weigh)
    for spelling in SPELLINGS.values():
        spelling(traced, jnp.ones(2))
    assert traced.count == 1


@pytest.mark.parametrize("name", SPELLINGS)
def test_output_is_the_same_whatever_the_spelling(name):
    traced = Traced(weigh)
    x = jnp.arange(2.0)
    assert jnp.array_equal(SPELLINGS[name](traced, x), 24 * x)


def test_spelling_of_variadic_functions_is_one_trace():
    traced = Traced(lambda x, *rest, scale=1, **named: x * scale)
    x = jnp.ones(2)
    for call in (
        lambda: traced(x, 1, 2, a=3, b=4),
        lambda: traced(x, 1, 2, b=4, a=3),
        lambda: traced(x, 1, 2, scale=1, a=3, b=4),
        lambda: traced(x, 1, 2, b=4, scale=1, a=3),
    ):
        call()
    assert traced.count == 1


def test_spelling_of_a_module_is_one_trace():
    count = 0

    class Model(Module):
        weight: object

        def __call__(self, x, scale=2):
            nonlocal count
            count += 1
            return self.weight * x * scale

    call = filter_jit(Model(jnp.ones(2)))
    call(jnp.ones(2))
    call(x=jnp.ones(2))
    call(jnp.ones(2), scale=2)
    call(scale=2, x=jnp.ones(2))
    assert count == 1


def test_spelling_of_a_partial_is_one_trace():
    count = 0

    def function(x, y, scale=2):
        nonlocal count
        count += 1
        return x * y * scale

    x = jnp.ones(2)
    call = filter_jit(functools.partial(function, x))
    call(x)
    call(y=x)
    call(x, scale=2)
    call(scale=2, y=x)
    assert count == 1


@pytest.mark.parametrize("transform", [filter_grad, filter_value_and_grad])
def test_spelling_of_a_transformed_function_is_one_trace(transform):
    count = 0

    @transform
    def loss(x, scale=2):
        nonlocal count
        count += 1
        return (x * scale).sum()

    gradient = filter_jit(loss)
    gradient(jnp.ones(2))
    gradient(jnp.ones(2), 2)
    gradient(jnp.ones(2), scale=2)
    assert count == 1


def test_default_that_would_be_traced_is_left_to_the_function():
    two = np.int32(2)
    traced = Traced(lambda x, y=two, z=3: x[:y] * z)
    for call in (lambda: traced(jnp.ones(4)), lambda: traced(jnp.ones(4), z=3)):
        assert call().shape == (2,)
    assert traced.count == 1


def test_default_that_is_not_hashable_is_left_to_the_function():
    default = []
    traced = Traced(lambda x, y=default: x if y is default else 2 * x)
    assert traced(jnp.ones(())) == 1


def test_array_in_the_place_of_a_default_is_one_trace_however_it_is_passed():
    default = jnp.ones(2)
    traced = Traced(lambda x, y=default: x + y)
    traced(jnp.ones(2), jnp.zeros(2))
    traced(jnp.ones(2), y=jnp.zeros(2))
    assert traced.count == 1
