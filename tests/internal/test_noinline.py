"""`noinline` functions are traced once for all their calls in a compiled program."""

import jax
import jax.numpy as jnp
import pytest

import eqxlike
from eqxlike import internal

X = jnp.array(2.0)


def product_and_traces():
    traces = []

    @internal.noinline
    def product(x, y):
        """The product."""
        traces.append(x)
        return x * y

    return product, traces


WAYS = [
    lambda f: f(X, y=X),
    lambda f: jax.jit(jax.hessian(f))(X, X),
    lambda f: jax.vmap(jax.grad(f))(jnp.stack([X, 2 * X]), jnp.stack([X, X])),
]


def test_noinline_gives_the_output_of_the_function():
    function, _ = product_and_traces()
    assert (function.__name__, function.__doc__) == ("product", "The product.")
    for way in WAYS:
        found, expected = way(function), way(lambda x, y: x * y)
        assert jax.tree.all(jax.tree.map(jnp.array_equal, found, expected))


def test_calls_with_equal_shapes_share_a_trace():
    product, traces = product_and_traces()
    compiled = jax.jit(lambda x, y: product(product(x, y), product(y, product(x, x))))
    assert (compiled(X, X), len(traces)) == (X**5, 1)


def test_arrays_of_a_callable_module_are_inputs_and_other_leaves_are_static():
    class Scale(eqxlike.Module):
        factor: jax.Array

        def __call__(self, x):
            return self.factor * x

    assert jax.grad(lambda factor: internal.noinline(Scale(factor))(X))(X) == X
    assert internal.noinline(lambda x, name: (x, name))(X, "name") == (X, "name")


def test_another_function_is_traced_again():
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


def intermediate(carry):
    x, kept, f_x = carry
    return x + f_x, f_x, kept


@pytest.mark.parametrize("number", [0, 2])
def test_scan_trick_gives_the_same_output_with_one_trace(number):
    traces = []

    def function(carry):
        x, kept, _ = carry
        traces.append(x)
        return x, kept, jnp.sin(x)

    def in_one_scan(x):
        start = x, jnp.zeros(2), jnp.zeros(2)
        return internal.scan_trick(function, [intermediate] * number, start)

    def one_by_one(x):
        carry = x, jnp.zeros(2), jnp.zeros(2)
        for index in range(number + 1):
            carry = *carry[:2], jnp.sin(carry[0])
            carry = intermediate(carry) if index < number else carry
        return carry

    x = jnp.array([0.5, 2.0])
    for way in (lambda f: f, jax.jacrev):
        traces.clear()
        found, expected = jax.jit(way(in_one_scan))(x), jax.jit(way(one_by_one))(x)
        assert jax.tree.all(jax.tree.map(jnp.allclose, found, expected))
        assert len(traces) == 1
