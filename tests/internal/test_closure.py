"""`closure_to_pytree`: functions as pytrees whose children are the closed-over values."""

import types

import jax
import jax.numpy as jnp
import optax
import pytest

import eqxlike
from eqxlike import internal


def scaling_by(factor, shift=0.0):
    def scale(x, *, power=1):
        return factor * x**power + shift

    return scale


def arrays_of(tree):
    return [leaf for leaf in jax.tree.leaves(tree) if isinstance(leaf, jax.Array)]


def test_converted_function_has_its_closed_over_arrays_as_leaves():
    assert internal.closure_to_pytree(scaling_by(2.0))(3.0, power=2) == 18.0
    factor = jnp.array(2.0)
    scale = internal.closure_to_pytree(scaling_by(factor))
    assert arrays_of(scale) == [factor]
    assert arrays_of(eqxlike.filter_grad(lambda scale: scale(3.0))(scale)) == [3.0]
    tree = {"a": 1, "b": abs, "c": jnp.sin}
    assert internal.closure_to_pytree(tree) == tree


def test_closed_over_functions_are_converted_too():
    inner = scaling_by(jnp.array(2.0))
    outer = internal.closure_to_pytree({"f": [lambda x: inner(inner(x))]})
    doubled = jax.tree.map(lambda leaf: 2 * leaf if isinstance(leaf, jax.Array) else leaf, outer)
    assert doubled["f"][0](1.0) == 16


def test_equal_closures_are_equal_and_compiled_once():
    rates = (0.1, 0.1, 0.2)
    one, other, different = (internal.closure_to_pytree(optax.adam(rate)) for rate in rates)
    assert jax.tree.leaves(one) == jax.tree.leaves(other) != jax.tree.leaves(different)
    assert jax.tree.structure(one) == jax.tree.structure(other)
    traces = []

    @eqxlike.filter_jit
    def call(function, x):
        traces.append(x)
        return function(x)

    outputs = [
        call(internal.closure_to_pytree(scaling_by(jnp.array(factor))), jnp.array(1.0))
        for factor in (2.0, 3.0)
    ]
    assert (outputs, len(traces)) == ([2.0, 3.0], 1)


def with_default(value):
    return lambda x=value: x


def with_keyword(value):
    return lambda *, x=value: x


def test_functions_with_other_defaults_or_globals_are_not_equal():
    def in_namespace(namespace):
        return types.FunctionType(scaling_by(1.0).__code__, namespace, closure=(cell, cell))

    cell = types.CellType(1.0)
    for make in (with_default, with_keyword):
        assert internal.closure_to_pytree(make(5))() == 5
        one, other = (jax.tree.leaves(internal.closure_to_pytree(make([]))) for _ in range(2))
        assert one != other
    one, other = (jax.tree.leaves(internal.closure_to_pytree(in_namespace({}))) for _ in range(2))
    assert one != other


def test_function_that_closes_over_itself_is_an_error():
    def factorial(n):
        return n * factorial(n - 1)

    message = "which closes over itself. Pass the function to itself as an argument."
    with pytest.raises(ValueError, match=message):
        internal.closure_to_pytree(factorial)

    def function():
        return later

    with pytest.raises(ValueError, match=r"closes over `later`: this variable has no value yet\."):
        internal.closure_to_pytree(function)
    later = 1
    assert function() == later
