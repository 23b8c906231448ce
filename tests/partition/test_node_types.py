"""For every kind of node and leaf, a jitted function gives the output of the plain function.

The tests pass similar values in turn, so that a wrongly shared cache entry would cause a failure.
They change mutable values between calls.
"""

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
import pytest

from eqxlike import filter_jit, is_array
from tests.partition.kinds import ARRAYS, KINDS, Box, Foreign
from tests.partition.models import Point

# Tuples (function that puts a value in a tree, function that reads it from the tree).
PLACES = {
    "list": (lambda value: [value, 1], lambda tree: tree[0]),
    "namedtuple": (lambda value: Point(1, value), lambda tree: tree.y),
    "module": (Box, lambda tree: tree.content),
    "list-in-module": (lambda value: Box([value]), lambda tree: tree.content[0]),
    "foreign-in-module-in-foreign": (
        lambda value: Foreign(Box(Foreign(value))),
        lambda tree: tree.content.content.content,
    ),
}
BARE = lambda value: value, lambda tree: tree


def assert_same(output, expected):
    """Asserts that two pytrees have equal arrays and equal texts."""
    ours, plain = map(jtu.tree_leaves, (output, expected))
    assert jtu.tree_structure(output) == jtu.tree_structure(expected)
    for one, other in zip(ours, plain, strict=True):
        if not is_array(other):
            assert one == other
            continue
        assert (one.shape, one.dtype) == (other.shape, other.dtype)
        if jnp.issubdtype(other.dtype, jax.dtypes.prng_key):
            one, other = map(jax.random.key_data, (one, other))
        np.testing.assert_allclose(one, other, rtol=1e-6)


def check(name, place, is_compiled):
    """Compares jitted with plain functions that read a value and, if possible, return it."""
    kind, (put, take) = KINDS[name], place

    def function(tree):
        return kind.read(take(tree)), tree if kind.is_returned else None

    trees = [put(value) for value in kind.make()]
    # `fresh` has no traces yet when the values have changed.
    jitted = filter_jit(function)
    fresh = filter_jit(lambda tree: function(tree))
    for call in (jitted, jitted, fresh):
        for tree in trees:
            with jax.disable_jit(not is_compiled):
                expected = kind.read(take(tree))
                output, returned = call(tree)
            assert_same(output, expected)
            if kind.is_returned:
                assert_same(kind.read(take(returned)), expected)
            if kind.mutate is not None:
                kind.mutate(take(tree))


COMPILED = ["module", "module-with-list", "namedtuple", "dict", "foreign", *ARRAYS]


@pytest.mark.parametrize("name", COMPILED)
def test_compiled_calls_match_the_plain_function(name):
    check(name, PLACES["list-in-module"], is_compiled=True)


@pytest.mark.parametrize("name", KINDS)
def test_calls_that_are_not_compiled_match_the_plain_function(name):
    check(name, BARE, is_compiled=False)
    # The kinds use different places.
    places = [*PLACES.values()]
    check(name, places[[*KINDS].index(name) % len(places)], is_compiled=False)
