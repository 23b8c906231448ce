"""What every transformed function has, whatever the transformation."""

import functools
import inspect
import pickle
from typing import Any

import equinox
import jax.numpy as jnp
import jax.tree_util as jtu
import pytest

import eqxlike

TRANSFORMATIONS = [
    "filter_checkpoint",
    "filter_grad",
    "filter_hessian",
    "filter_jacfwd",
    "filter_jacrev",
    "filter_value_and_grad",
]
each = pytest.mark.parametrize("name", TRANSFORMATIONS)
TWO, THREE = jnp.float32(2), jnp.float32(3)


def double(x, y: int = 3, *, key=None):
    """Doubles."""
    return 2 * x


class Model(eqxlike.Module):
    weight: Any

    def __call__(self, x):
        return self.weight * x


@each
def test_shows_the_metadata_of_the_function(name):
    transformed = getattr(eqxlike, name)(double)
    for attribute in ("__name__", "__qualname__", "__doc__", "__module__", "__annotations__"):
        assert getattr(transformed, attribute) == getattr(double, attribute)


@each
def test_shows_the_function_and_its_signature(name):
    transformed = getattr(eqxlike, name)(double)
    assert transformed.__wrapped__ is double
    assert inspect.signature(transformed) == inspect.signature(double)


@each
def test_is_a_pytree_of_what_it_wraps(name):
    assert jtu.tree_leaves(getattr(eqxlike, name)(Model(TWO))) == [TWO]


@each
def test_is_equal_to_one_of_the_same_function(name):
    transform = getattr(eqxlike, name)
    assert transform(double) == transform(double)
    assert hash(transform(double)) == hash(transform(double))
    assert transform(double) != transform(test_is_equal_to_one_of_the_same_function)


@each
def test_may_be_pickled(name):
    transformed = getattr(eqxlike, name)(double)
    assert pickle.loads(pickle.dumps(transformed)) == transformed


@each
def test_may_wrap_a_partial(name):
    transform = getattr(eqxlike, name)
    partial = functools.partial(lambda factor, x: factor * x, THREE)
    expected = transform(lambda x: THREE * x)(TWO)
    assert eqxlike.tree_equal(transform(partial)(TWO), expected)


@each
def test_is_a_method_in_the_body_of_a_class(name):
    class Scale(eqxlike.Module):
        weight: Any

        @getattr(eqxlike, name)
        def scale(self, x, *, offset):
            """Scales."""
            return self.weight * x + offset

    transformed = getattr(eqxlike, name)(lambda scale, x, offset: scale.weight * x + offset)
    scale = Scale(TWO)
    expected = transformed(scale, THREE, TWO)
    assert eqxlike.tree_equal(scale.scale(THREE, offset=TWO), expected)
    assert eqxlike.tree_equal(Scale.scale(scale, THREE, offset=TWO), expected)
    assert (scale.scale.__name__, scale.scale.__doc__) == ("scale", "Scales.")
    assert list(inspect.signature(scale.scale).parameters) == ["x", "offset"]


@each
def test_is_a_method_in_the_body_of_any_class(name):
    class Plain:
        scale = getattr(eqxlike, name)(double)

    plain = Plain()
    assert plain.scale.__self__ is plain
    assert Plain.scale.__wrapped__ is double


@pytest.mark.parametrize("name", ["filter_hessian", "filter_jacfwd", "filter_jacrev"])
def test_methods_of_equinox_lose_the_instance(name):
    class Theirs(equinox.Module):
        scale = getattr(equinox, name)(lambda self, x: x)

    with pytest.raises(TypeError, match="missing 1 required positional argument"):
        Theirs().scale(THREE)


@each
def test_arrays_of_what_it_wraps_are_traced_by_filter_jit(name):
    traces = []

    class Counting(eqxlike.Module):
        weight: Any

        def __call__(self, x):
            traces.append(1)
            return self.weight * x

    jitted = eqxlike.filter_jit(lambda function, x: function(x))
    for weight in (TWO, THREE):
        jitted(getattr(eqxlike, name)(Counting(weight)), TWO)
    assert len(traces) == 1
