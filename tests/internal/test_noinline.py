"""Functions that stay functions in a compiled program."""

import jax
import jax.numpy as jnp
import pytest

import eqxlike
from eqxlike import internal
from tests.internal.beside_equinox_internal import both

X = jnp.array(2.0)


def product_of(eqxi):
    traces = []

    @eqxi.noinline
    def product(x, y):
        """The product."""
        traces.append(x)
        return x * y

    return product, traces


WAYS = {
    "eager": lambda f: f(X, X),
    "jit": lambda f: jax.jit(lambda x, y: f(x, y))(X, X),
    "by keyword": lambda f: f(X, y=X),
    "grad": lambda f: jax.grad(f, argnums=(0, 1))(X, X),
    "hessian": lambda f: jax.jit(jax.hessian(f))(X, X),
    "vmap": lambda f: jax.vmap(f, in_axes=(0, None))(jnp.stack([X, 2 * X]), X),
    "vmap-grad": lambda f: jax.vmap(jax.grad(f))(jnp.stack([X, 2 * X]), jnp.stack([X, X])),
}


@both
@pytest.mark.parametrize("way", WAYS)
def test_it_is_the_function(eqxi, way):
    function, _ = product_of(eqxi)
    assert jax.tree.all(
        jax.tree.map(jnp.array_equal, WAYS[way](function), WAYS[way](lambda x, y: x * y))
    )


def test_calls_with_equal_shapes_are_traced_once():
    product, traces = product_of(internal)
    compiled = jax.jit(lambda x, y: product(product(x, y), product(y, product(x, x))))
    assert (compiled(X, X), len(traces)) == (X**5, 1)


@both
def test_values_that_are_no_arrays_are_static(eqxi):
    function = eqxi.noinline(lambda x, name: (x, name))
    assert function(X, "name") == (X, "name")


@both
def test_arrays_of_a_callable_module_are_inputs(eqxi):
    class Scale(eqxlike.Module):
        factor: jax.Array

        def __call__(self, x):
            return self.factor * x

    assert jax.grad(lambda factor: eqxi.noinline(Scale(factor))(X))(X) == X


def test_it_shows_what_it_wraps():
    product, _ = product_of(internal)
    assert (product.__name__, product.__doc__) == ("product", "The product.")


def test_another_function_has_the_program_traced_anew():
    traces = []

    @eqxlike.filter_jit
    def call(function, x):
        traces.append(function)
        return function(x)

    def shape(function, x):
        return x

    doubled, tripled = (internal.noinline(lambda x, n=n: n * x, shape) for n in (2, 3))
    assert (call(doubled, X), call(tripled, X), call(doubled, X)) == (2 * X, 3 * X, 2 * X)
    assert len(traces) == 2
