"""The law of all kinds of nodes and leaves: no call of a jitted function differs from a plain one.

Values that are alike are passed in turn, so that each finds what the others left behind; and what
can be changed in place is changed between the calls.
"""

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
import pytest

from eqxlike import filter_jit, is_array
from tests.partition.kinds import ARRAYS, KINDS, Box, Foreign
from tests.partition.models import Point

# Where a value stands, and the way back to it.
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
    """The arrays are equal, and so are the texts."""
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
    """Calls functions that return what they read in a value, and the value if they may."""
    kind, (put, take) = KINDS[name], place

    def function(tree):
        return kind.read(take(tree)), tree if kind.is_returned else None

    trees = [put(value) for value in kind.make()]
    # The last time round, of functions that have not been called before.
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
def test_each_call_gives_what_the_plain_function_gives(name):
    check(name, PLACES["list-in-module"], is_compiled=True)


@pytest.mark.parametrize("name", KINDS)
def test_each_call_gives_what_the_plain_function_gives_where_nothing_is_compiled(name):
    check(name, BARE, is_compiled=False)
    # Each in another place, in turn.
    places = [*PLACES.values()]
    check(name, places[[*KINDS].index(name) % len(places)], is_compiled=False)
