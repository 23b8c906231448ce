"""The checking mode finds every edit of a Module, and accepts what was not changed."""

import contextlib
import copy

import jax.numpy as jnp
import numpy as np
import pytest

from eqxlike import PartitionError, checking_partitions, filter_jit
from eqxlike._partition import flatten
from tests.partition.models import Pair, flatten_cached

EDITS = {
    "array": lambda it: it.__dict__.update(left=jnp.ones(2)),
    "static-leaf": lambda it: it.__dict__.update(right="c"),
    "equal-static-leaf": lambda it: it.__dict__.update(right=1.0),
    "static-field": lambda it: it.__dict__.update(mode="b"),
    "setattr": lambda it: object.__setattr__(it, "left", jnp.ones(2)),
    "to-another-type": lambda it: it.__dict__.update(left=[jnp.ones(2)]),
    "to-static": lambda it: it.__dict__.update(left=1.0),
    "equal-array": lambda it: it.__dict__.update(left=it.left + 0),
}
WHERE = {
    "itself": lambda it: it,
    "in-a-tuple": lambda it: (1, it),
    "in-a-list": lambda it: [1, it],
    "in-a-module-with-a-list": lambda it: Pair([], it),
}


@pytest.mark.parametrize("name", EDITS)
@pytest.mark.parametrize("where", WHERE)
def test_checking_finds_an_edit(name, where):
    module = flatten_cached(Pair(jnp.ones(2), 1))
    tree = WHERE[where](module)
    EDITS[name](module)
    with checking_partitions(), pytest.raises(PartitionError, match="Pair was changed"):
        flatten(tree)


@pytest.mark.parametrize("name", EDITS)
def test_checking_finds_an_edit_inside_a_module_that_is_inside(name):
    inner = Pair(jnp.ones(2), 1)
    outer = flatten_cached(Pair((inner, "b")))
    EDITS[name](inner)
    with checking_partitions(), pytest.raises(PartitionError, match="Pair was changed"):
        flatten(outer)


def test_checking_finds_an_edit_in_a_warm_call():
    function = filter_jit(lambda module: module.left)
    pair = Pair(jnp.ones(2))
    function(pair)
    function(pair)
    pair.__dict__["left"] = jnp.zeros(2)
    with checking_partitions(), pytest.raises(PartitionError):
        function(pair)


@pytest.mark.parametrize("name", EDITS)
def test_checking_finds_an_edit_of_a_module_that_a_filtered_function_returned(name):
    make = filter_jit(lambda x: Pair(x, 1))
    make(jnp.ones(2))
    module = make(jnp.ones(2))
    EDITS[name](module)
    with checking_partitions(), pytest.raises(PartitionError, match="Pair was changed"):
        filter_jit(lambda module: module.left)(module)


def test_checking_accepts_what_was_not_changed():
    module = flatten_cached(Pair(jnp.ones(2), np.ones(2)))
    with checking_partitions():
        assert flatten(module)[0] == [module.left, module.right]


def test_checking_accepts_a_numpy_array_changed_in_place():
    module = flatten_cached(Pair(np.zeros(2)))
    module.left.fill(1)
    with checking_partitions():
        assert flatten(module)[0][0] is module.left


def test_checking_accepts_a_copy_that_was_changed_before_use():
    module = flatten_cached(Pair(np.zeros(2)))
    copied = copy.copy(module)
    copied.__dict__["left"] = np.ones(3)
    with checking_partitions():
        assert flatten(copied)[0][0].shape == (3,)


def test_checking_does_not_change_what_is_returned():
    module = Pair(jnp.ones(2), (1, "a"))
    function = filter_jit(lambda module: (module.right, module.left * 2))
    expected = function(module)
    with checking_partitions():
        output = function(module)
    assert output[0] == expected[0]
    assert (output[1] == expected[1]).all()


def test_checking_ends_with_its_context(monkeypatch):
    monkeypatch.setattr("eqxlike._checking._depth", 0)
    module = flatten_cached(Pair(jnp.ones(2)))
    with checking_partitions():
        pass
    module.__dict__["left"] = jnp.zeros(2)
    assert flatten(module)[0][0] is not module.left


def test_checking_sees_that_partitions_kept_at_each_level_of_1_000_are_right():
    module = Pair(jnp.ones(2))
    for _ in range(1_000):
        module = flatten_cached(Pair(module))
    with checking_partitions(), contextlib.suppress(RecursionError):
        arrays = flatten(module)[0]
        assert len(arrays) == 1
        return
    pytest.fail("the check takes the stack of Python at each level")
