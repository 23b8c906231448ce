"""Equal structures are the same object, which is freed after its last use."""

import functools
import gc
import weakref

import jax.numpy as jnp
import numpy as np
import pytest

from eqxlike._partition import num_interned
from tests.partition.models import Pair, structure_of
from tests.partition.statics import Holder, Named


def test_equal_trees_have_one_structure():
    structures = {structure_of(Pair(x)) for x in (jnp.ones(2), jnp.arange(3), np.ones(()))}
    assert len(structures) == 1
    first = structure_of(Pair(float("1.5"), float("nan"), "".join(["te", "xt"])))
    assert structure_of(Pair(float("1.5"), float("nan"), "".join(["te", "xt"]))) is first


def test_structures_are_freed_with_their_users():
    gc.collect()
    before = num_interned()
    trees = [Pair(f"structure {index}") for index in range(100)]
    structures = [structure_of(tree) for tree in trees]
    assert num_interned() > before + 100
    del trees, structures
    gc.collect()
    assert num_interned() == before


@pytest.mark.parametrize("make", [lambda: lambda: 1, lambda: Holder([1]), lambda: Named("a")])
def test_table_of_structures_holds_no_value(make):
    value = make()
    reference = weakref.ref(value)
    structure = structure_of((value, Pair(value)))
    assert structure.num_arrays == 0
    del value, structure
    gc.collect()
    assert reference() is None


def test_structure_keeps_alive_the_values_in_its_key():
    structure = structure_of(Pair(lambda: 1, mode=lambda: 2))
    gc.collect()
    # A new function at the address of a freed function could be mistaken for it.
    assert all(structure_of(Pair(lambda: 1, mode=lambda: 2)) is not structure for _ in range(50))
    for index in range(200):
        function = functools.partial(lambda index: index, index).func
        assert structure_of((function,)).children[0].meta is function
