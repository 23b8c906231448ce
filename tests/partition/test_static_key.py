"""Keys and guards of static values. Two values share a key only if no program can distinguish them.

The fast path of `filter_jit` calls a guard to test whether two values have the same key.
"""

import datetime
import fractions
import itertools
import math
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqxlike._partition import GuardWriter, StaticKey, flatten
from eqxlike._partition._static_key import write_static_guard
from eqxlike._traceback import compile_function
from tests.partition.statics import (
    BY_IDENTITY,
    CHANGING,
    DISTINGUISHABLE,
    INTERCHANGEABLE,
    Colour,
    Config,
    Listed,
    Unhashable,
    power,
)


def key(value):
    return StaticKey(value).key


def guard_of(value):
    """The guard of `value`, with the signature that the fast path uses."""
    writer = GuardWriter(flatten, (), False)
    write_static_guard(writer, "other", value, of_node=True)
    lines = ["def passes(other):", "    try:", *(f"        {line}" for line in writer.lines)]
    lines += ["        return True", "    except Exception:", "        return False"]
    return compile_function(lines, writer.namespace, "guard")


@pytest.mark.parametrize("row", DISTINGUISHABLE)
def test_distinguishable_values_have_different_keys(row):
    values = DISTINGUISHABLE[row]
    for first, second in itertools.combinations(values, 2):
        assert key(first) != key(second)
    for value in values:
        passes = guard_of(value)
        assert [other for other in values if passes(other) and other is not value] == []
        assert passes(value)


def test_equal_values_of_one_type_have_equal_keys():
    for name, make in INTERCHANGEABLE.items():
        first, second = make(), make()
        assert key(first) == key(second), name
        assert guard_of(first)(second), name


@pytest.mark.parametrize("name", BY_IDENTITY)
def test_value_hashed_by_identity_keeps_its_key_after_a_change_in_place(name):
    make, edit = BY_IDENTITY[name]
    value, other = make(), make()
    static, passes = StaticKey(value), guard_of(value)
    assert key(other) != static.key
    assert not passes(other)
    edit(value)
    assert static.is_immutable
    assert key(value) == static.key
    assert passes(value)


@pytest.mark.parametrize("name", CHANGING)
def test_change_in_place_changes_the_key(name):
    make, edit = CHANGING[name]
    value, other = make(), make()
    static, passes, is_same = StaticKey(value), guard_of(value), key(other) == key(value)
    assert not static.is_immutable
    assert (key(value) == static.key, static.is_current(), passes(value)) == (True, True, True)
    assert passes(other) == is_same
    edit(value)
    assert (key(value) == static.key, static.is_current(), passes(value)) == (False, False, False)
    # `other` does not pass either, although it equals the value before the change.
    assert not passes(other)


IMMUTABLE = [
    *(1, 1.5, "text", power, len, int, math, Colour.RED, (1, ("a", power)), Config(1)),
    *(jax.jit(power), jax.nn.relu, np.add, np.dtype("float32"), jnp.float32, jax.P("x")),
    *(pathlib.Path("a"), datetime.date(2020, 1, 1), fractions.Fraction(1, 3)),
]


def test_values_that_cannot_change_are_immutable():
    assert [value for value in IMMUTABLE if not StaticKey(value).is_immutable] == []


def test_value_that_contains_itself_has_a_key():
    make, _ = CHANGING["list-in-partial"]
    partial, listed = make(), Listed([])
    partial.args[0].append(partial)
    listed.sizes.append(listed)
    assert key(partial) == key(partial)
    assert key(listed) == key(listed)


def test_unhashable_value_is_refused():
    unhashable = [[1], {"a": 1}, {1}, bytearray(b"a"), Unhashable(1), np.zeros(2)]
    for value in (*unhashable, (1, [2]), Config([1])):
        with pytest.raises(TypeError, match="unhashable"):
            StaticKey(value)


def test_key_and_snapshot_of_a_container_agree_if_it_changes_while_the_key_is_made():
    class Appending:
        def __hash__(self):
            # Stands for another thread.
            values.append(1)
            return 1

    values: list = [Appending(), 2]
    static = StaticKey(values, of_node=True)
    _, elements, _ = static.key
    [(_, _, saved)] = static.containers
    assert len(elements) == len(saved) == 2
