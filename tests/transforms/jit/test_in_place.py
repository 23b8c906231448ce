"""Changes in place. The next call sees a change of a pytree, a partial or a value hashed by value.
As in Equinox and `jax.jit`, it does not see a change of an object hashed by identity.
"""

import functools
import itertools

import equinox
import jax
import jax.numpy as jnp

from eqxlike import filter_jit
from tests.partition.models import Pair
from tests.partition.statics import BY_IDENTITY, CHANGING, show

# Pairs of a function that puts a value in an argument, and a function that reads it.
PLACES = {
    "argument": (lambda value: value, lambda tree: tree),
    "inner-field": (lambda value: Pair(Pair((1, value)), jnp.ones(2)), lambda it: it.left.left[1]),
    "static-field": (lambda value: Pair(jnp.ones(2), mode=value), lambda tree: tree.mode),
}


def assert_change_is_seen(make, edit, place):
    put, take = PLACES[place]
    value = make()
    tree = put(value)
    jitted = filter_jit(lambda tree: show(take(tree)))
    for _ in range(2):
        assert jitted(tree) == show(value)
    edit(value)
    for _ in range(2):
        assert jitted(tree) == show(value)


def test_next_call_sees_a_change_in_place_of_a_value_with_parts():
    # Tests each kind of value in one place, and each place with several kinds.
    for example, place in zip(CHANGING.values(), itertools.cycle(PLACES), strict=False):
        assert_change_is_seen(*example, place)
    in_list = lambda: [functools.partial(max, [1])], lambda it: it[0].args[0].append(2)
    assert_change_is_seen(*in_list, "inner-field")


def traces_of(jit, make, edit):
    """The number of traces after each of three calls."""
    count, counts = 0, []

    def function(value, x):
        nonlocal count
        count += 1
        return x

    jitted, value = jit(function), make()
    for step in (lambda: value, lambda: edit(value) or value, make):
        jitted(step(), jnp.ones(2))
        counts.append(count)
    return counts


def test_object_hashed_by_identity_is_static_as_in_equinox_and_jax():
    for make, edit in BY_IDENTITY.values():
        assert traces_of(filter_jit, make, edit) == [1, 1, 2]
    for jit in (equinox.filter_jit, functools.partial(jax.jit, static_argnums=0)):
        assert traces_of(jit, *BY_IDENTITY["method"]) == [1, 1, 2]


def test_change_in_place_of_one_of_two_equal_values_is_not_seen_in_the_other():
    for make, edit in CHANGING.values():
        first, second = make(), make()
        jitted = filter_jit(lambda value, x: (value, show(value)))
        jitted(first, jnp.ones(2))
        edit(first)
        # The existing trace, and a new trace.
        for size in (2, 3):
            returned, text = jitted(second, jnp.ones(size))
            assert show(returned) == text == show(second)
