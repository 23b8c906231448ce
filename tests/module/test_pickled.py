"""What transformations return is pickled, and called when it is loaded."""

import functools
import pickle
from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import pytest
from jaxtyping import Array, Float

import eqxlike


class Scale(eqxlike.Module):
    # An annotation that pickle does not take.
    factor: Float[Array, ""]
    shift: jax.Array | None = None

    def __call__(self, x: Float[Array, ""]) -> Float[Array, ""]:
        return self.factor * x**2

    def method(self, x: Float[Array, ""]) -> Float[Array, ""]:
        return self.factor * x**2

    @eqxlike.filter_jit
    def jitted(self, x: Float[Array, ""]) -> Float[Array, ""]:
        return self.factor * x**2

    @eqxlike.filter_grad
    def gradient(self, x: Float[Array, ""]) -> Float[Array, ""]:
        return self.factor * x**2


def square(x: Float[Array, ""]) -> Float[Array, ""]:
    """Of a number."""
    return x**2


def scaled(factor: Any, x: Float[Array, ""]) -> Float[Array, ""]:
    return factor * x**2


MODULE = Scale(jnp.array(3.0))

CALLABLES = {
    "module": MODULE,
    "layer": eqxlike.nn.Linear("scalar", "scalar", key=jax.random.key(0)),
    "function": square,
    "method": MODULE.method,
    "method that is jitted": MODULE.jitted,
    "call": MODULE.__call__,
    "functools.partial": functools.partial(scaled, jnp.array(3.0)),
    "jax.tree_util.Partial": jtu.Partial(scaled, jnp.array(3.0)),
    "Partial": eqxlike.Partial(scaled, jnp.array(3.0)),
}

TRANSFORMATIONS = {
    "filter_jit": eqxlike.filter_jit,
    "filter_jit with options": eqxlike.filter_jit(keep_unused=True),
    "filter_grad": eqxlike.filter_grad,
    "filter_vmap": eqxlike.filter_vmap(in_axes=None, axis_size=2),
    "filter_checkpoint": eqxlike.filter_checkpoint,
    "filter_jit of filter_grad": lambda function: eqxlike.filter_jit(eqxlike.filter_grad(function)),
}


@pytest.mark.parametrize("callable_", CALLABLES)
@pytest.mark.parametrize("transformation", TRANSFORMATIONS)
def test_a_transformed_callable_is_pickled_and_called(transformation, callable_):
    transformed = TRANSFORMATIONS[transformation](CALLABLES[callable_])
    loaded = pickle.loads(pickle.dumps(transformed))
    found, expected = (each(jnp.array(2.0)) for each in (loaded, transformed))
    assert eqxlike.tree_equal(found, expected)


@pytest.mark.parametrize("callable_", ["module", "function", "method"])
def test_a_loaded_function_shows_what_it_wraps(callable_):
    transformed = eqxlike.filter_jit(CALLABLES[callable_])
    loaded = pickle.loads(pickle.dumps(transformed))
    names = ("__name__", "__qualname__", "__doc__", "__module__", "__annotations__")
    shown = [[getattr(each, name, None) for name in names] for each in (loaded, transformed)]
    assert shown[0] == shown[1]


def test_a_method_that_is_differentiated_is_pickled_and_called():
    loaded = pickle.loads(pickle.dumps(MODULE.gradient))
    assert loaded(jnp.array(2.0)) == MODULE.gradient(jnp.array(2.0))


def test_a_loaded_function_traces_anew_and_once():
    loaded = pickle.loads(pickle.dumps(eqxlike.filter_jit(count_traces)))
    before = len(traces)
    for _ in range(3):
        loaded(jnp.array(1.0))
    assert len(traces) - before <= 1


traces: list[int] = []


def count_traces(x):
    traces.append(1)
    return x
