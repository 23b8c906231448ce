"""Keys of static values: two values share a key only if no program could tell them apart."""

import datetime
import fractions
import gc
import itertools
import math
import pathlib
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given

from eqxlike._partition import StaticKey
from tests.partition.statics import (
    BY_IDENTITY,
    CHANGING,
    INTERCHANGEABLE,
    TOLD_APART,
    Colour,
    Config,
    Holder,
    Listed,
    Unhashable,
    describe,
    nests,
    power,
)


def key(value):
    return StaticKey(value).key


@pytest.mark.parametrize("row", TOLD_APART)
def test_values_that_a_program_tells_apart_have_different_keys(row):
    for first, second in itertools.combinations(TOLD_APART[row], 2):
        assert key(first) != key(second)


@pytest.mark.parametrize("name", INTERCHANGEABLE)
def test_equal_values_of_one_type_have_equal_keys(name):
    make = INTERCHANGEABLE[name]
    first, second = make(), make()
    assert key(first) == key(second)


def test_graphs_of_nnx_made_anew_have_equal_keys():
    first, second, other = (
        nnx.split(nnx.Linear(2, size, rngs=nnx.Rngs(0)))[0] for size in (2, 2, 3)
    )
    assert key(first) == key(second)
    assert key(first) != key(other)


@given(nests, nests)
def test_keys_are_equal_just_where_values_are_indistinguishable(first, second):
    assert (key(first) == key(second)) == (describe(first) == describe(second))


@given(nests)
def test_key_is_hashable(value):
    assert hash(key(value)) == hash(key(value))


@pytest.mark.parametrize("name", BY_IDENTITY)
def test_key_of_what_hashes_by_identity_stays_whatever_is_changed_in_place(name):
    make, edit = BY_IDENTITY[name]
    value = make()
    static = StaticKey(value)
    edit(value)
    assert static.is_immutable
    assert key(value) == static.key


@pytest.mark.parametrize("name", BY_IDENTITY)
def test_two_that_hash_by_identity_have_different_keys(name):
    make, _ = BY_IDENTITY[name]
    first, second = make(), make()
    assert key(first) != key(second)


@pytest.mark.parametrize("name", CHANGING)
def test_key_made_anew_shows_a_change_in_place(name):
    make, edit = CHANGING[name]
    value = make()
    static = StaticKey(value)
    assert static.is_current()
    edit(value)
    assert key(value) != static.key
    assert not static.is_current()


@pytest.mark.parametrize("name", CHANGING)
def test_value_that_is_looked_at_anew_is_not_immutable(name):
    make, _ = CHANGING[name]
    assert not StaticKey(make()).is_immutable


@pytest.mark.parametrize("name", CHANGING)
def test_key_of_what_did_not_change_stays(name):
    make, _ = CHANGING[name]
    value = make()
    assert key(value) == key(value)


IMMUTABLE = {
    "int": 1,
    "float": 1.5,
    "str": "text",
    "function": power,
    "builtin": len,
    "type": int,
    "module": math,
    "enum": Colour.RED,
    "tuple": (1, ("a", power)),
    "dataclass": Config(1),
    "jitted": jax.jit(power),
    "jax-function": jax.nn.relu,
    "ufunc": np.add,
    "dtype": np.dtype("float32"),
    "jax-dtype": jnp.float32,
    "partition-spec": jax.P("x"),
    "path": pathlib.Path("a"),
    "date": datetime.date(2020, 1, 1),
    "fraction": fractions.Fraction(1, 3),
}


@pytest.mark.parametrize("name", IMMUTABLE)
def test_value_that_cannot_change_is_immutable(name):
    assert StaticKey(IMMUTABLE[name]).is_immutable


def test_list_in_a_partial_of_its_own_has_a_key():
    make, _ = CHANGING["list-in-partial"]
    partial = make()
    partial.args[0].append(partial)
    assert key(partial) == key(partial)


def test_dataclass_in_a_list_of_its_own_has_a_key():
    listed = Listed([])
    listed.sizes.append(listed)
    assert key(listed) == key(listed)


UNHASHABLE = {
    "list": [1],
    "dict": {"a": 1},
    "set": {1},
    "bytearray": bytearray(b"a"),
    "object": Unhashable(1),
    "array": np.zeros(2),
    "in-tuple": (1, [2]),
    "in-dataclass": Config([1]),
}


@pytest.mark.parametrize("name", UNHASHABLE)
def test_unhashable_value_is_refused(name):
    with pytest.raises(TypeError, match="unhashable"):
        StaticKey(UNHASHABLE[name])


def test_key_alone_does_not_hold_what_it_names():
    def function():
        pass

    reference = weakref.ref(function)
    only_key = key(function)
    del function
    gc.collect()
    assert reference() is None
    assert only_key == only_key


@pytest.mark.parametrize("make", [lambda: lambda: 1, lambda: Holder(1)])
def test_static_key_holds_what_it_names(make):
    value = make()
    reference = weakref.ref(value)
    static = StaticKey((1, value))
    del value
    gc.collect()
    assert reference() in static.held
