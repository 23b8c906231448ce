"""Several calls of one function come to what they come to one by one, and are traced once."""

import jax
import jax.numpy as jnp
import pytest

from tests.internal.beside_equinox_internal import both

X = jnp.array([0.5, 2.0])
INIT = (X, jnp.zeros(2), jnp.zeros(2))


def intermediate(carry):
    x, kept, f_x = carry
    return x + f_x, f_x, kept


def calls_of(eqxi, number):
    """A function of the first of three arrays, and how often it was traced."""
    traces = []

    def function(carry):
        x, kept, _ = carry
        traces.append(x)
        return x, kept, jnp.sin(x)

    return lambda x: eqxi.scan_trick(function, [intermediate] * number, (x, *INIT[1:])), traces


def one_by_one(x, number):
    carry = (x, *INIT[1:])
    for index in range(number + 1):
        x, kept, _ = carry
        carry = x, kept, jnp.sin(x)
        if index < number:
            carry = intermediate(carry)
    return carry


WAYS = {
    "eager": lambda function: function(X),
    "jit": lambda function: jax.jit(function)(X),
    "vmap": lambda function: jax.vmap(function, in_axes=0, out_axes=0)(jnp.stack([X, 2 * X])),
    "jacrev": lambda function: jax.jacrev(function)(X),
    "jacfwd": lambda function: jax.jacfwd(function)(X),
}


@both
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("number", [0, 1, 3])
def test_calls_come_to_the_same(eqxi, number, way):
    function, traces = calls_of(eqxi, number)
    found, expected = WAYS[way](function), WAYS[way](lambda x: one_by_one(x, number))
    assert jax.tree.all(jax.tree.map(jnp.allclose, found, expected))
    assert len(traces) == 1
