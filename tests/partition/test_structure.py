"""Structures are interned: equal ones are one object while it lives, and hold nothing after."""

import collections
import functools
import gc
import threading
import weakref

import jax.numpy as jnp
import numpy as np
import pytest

from eqxlike import Module, field
from eqxlike._partition import ArrayLeaf, StaticLeaf, TupleNode, flatten, num_interned
from tests.partition.models import Pair
from tests.partition.statics import Holder, Named


class OtherPair(Module):
    left: object
    right: object = None
    mode: object = field(static=True, default="a")


Point = collections.namedtuple("Point", ["x", "y"])
OtherPoint = collections.namedtuple("OtherPoint", ["x", "y"])


def structure_of(tree):
    return flatten(tree)[1]


MAKERS = {
    "array": lambda: jnp.ones(2),
    "numpy": lambda: np.ones(2),
    "static": lambda: "".join(["te", "xt"]),
    "nan": lambda: float("nan"),
    "none": lambda: None,
    "tuple": lambda: (jnp.ones(2), 1, "a"),
    "namedtuple": lambda: Point(jnp.ones(2), 1),
    "list": lambda: [jnp.ones(2), 1],
    "dict": lambda: {"b": jnp.ones(2), "a": 1},
    "ordered-dict": lambda: collections.OrderedDict(b=jnp.ones(2), a=1),
    "module": lambda: Pair(jnp.ones(2), float("1.5"), "".join(["te", "xt"])),
    "nest": lambda: Pair((jnp.ones(2), [Pair(None)]), {"a": Point(1, np.zeros(3))}),
}


@pytest.mark.parametrize("name", MAKERS)
def test_equal_trees_have_one_structure(name):
    first = structure_of(MAKERS[name]())
    assert structure_of(MAKERS[name]()) is first


def test_structure_is_the_same_whatever_shape_dtype_and_kind_of_array():
    structures = {structure_of(Pair(x)) for x in (jnp.ones(2), jnp.arange(3), np.ones(()))}
    assert len(structures) == 1


DIFFERENT = {
    "kind-of-module": (Pair(1), OtherPair(1)),
    "static-field": (Pair(1, mode="a"), Pair(1, mode="b")),
    "equal-static-fields": (Pair(1, mode=1), Pair(1, mode=True)),
    "zeros-in-static-fields": (Pair(1, mode=0.0), Pair(1, mode=-0.0)),
    "static-leaf": (Pair(1), Pair(2)),
    "equal-static-leaves": (Pair(1), Pair(1.0)),
    "array-static": (Pair(jnp.ones(())), Pair(1.0)),
    "place-of-array": (Pair(jnp.ones(()), None), Pair(None, jnp.ones(()))),
    "kind-of-namedtuple": (Point(1, 2), OtherPoint(1, 2)),
    "tuple-namedtuple": ((1, 2), Point(1, 2)),
    "tuple-list": ((1, 2), [1, 2]),
    "keys": ({"a": 1}, {"b": 1}),
    "equal-keys": ({1: "a"}, {True: "a"}),
    "kind-of-dict": ({"a": 1}, collections.OrderedDict(a=1)),
    "default-factory": (
        collections.defaultdict(int, a=1),
        collections.defaultdict(list, a=1),
    ),
    "order": (collections.OrderedDict(a=1, b=1), collections.OrderedDict(b=1, a=1)),
    "length": ((1,), (1, 1)),
    "empty": ((), []),
    "none-empty": (None, ()),
    "functions": (Pair(lambda: 1), Pair(lambda: 1)),
}


@pytest.mark.parametrize("name", DIFFERENT)
def test_trees_that_differ_have_different_structures(name):
    first, second = map(structure_of, DIFFERENT[name])
    assert first is not second


def test_threads_that_intern_at_once_get_one_structure():
    start = threading.Barrier(16)
    found = []

    def intern(_):
        start.wait()
        found.append(structure_of(Pair((jnp.ones(2), "made by many threads"))))

    threads = [threading.Thread(target=intern, args=(index,)) for index in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 16
    assert len(set(map(id, found))) == 1


def test_static_leaf_holds_its_value_by_reference():
    value = "".join(["held", " by reference"])
    assert structure_of(value).meta is value


def test_static_leaves_of_equal_value_and_different_identity_that_can_change_are_different():
    # The values are equal now, but only one of them may change.
    first, second = (functools.partial(max, [1]) for _ in range(2))
    assert structure_of(first) is not structure_of(second)


def test_partial_changed_in_place_has_another_structure_until_it_is_changed_back():
    partial = functools.partial(max, [1])
    before = structure_of(partial)
    partial.args[0].append(2)
    assert structure_of(partial) is not before
    partial.args[0].pop()
    assert structure_of(partial) is before


def test_structures_die_with_who_uses_them():
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


def test_structure_keeps_alive_what_its_key_names():
    structure = structure_of(Pair(lambda: 1, mode=lambda: 2))
    gc.collect()
    # Were the functions gone, new ones could be made in their places and be taken for them.
    assert all(structure_of(Pair(lambda: 1, mode=lambda: 2)) is not structure for _ in range(50))


def test_new_function_in_the_place_of_a_dead_one_is_told_apart():
    for index in range(200):
        function = functools.partial(lambda index: index, index).func
        assert structure_of((function,)).children[0].meta is function


def test_number_of_arrays_is_that_of_the_leaves():
    tree = Pair((jnp.ones(2), 1), [np.ones(2), {"a": Pair(jnp.ones(3), "b")}])
    assert structure_of(tree).num_arrays == 3


KEEPABLE = {
    "array": lambda: jnp.ones(2),
    "numpy": lambda: np.ones(2),
    "numpy-scalar": lambda: np.float32(1),
    "none": lambda: None,
    "number": lambda: 1.5,
    "string": lambda: "a",
    "function": lambda: jnp.sin,
    "object": lambda: Holder([1]),
    "tuple": lambda: (jnp.ones(2), None),
    "namedtuple": lambda: Point(jnp.ones(2), "a"),
    "module": lambda: Pair(Pair(jnp.ones(2)), mode=("a", 1)),
}
NOT_KEEPABLE = {
    "list": lambda: [jnp.ones(2)],
    "dict": lambda: {"a": jnp.ones(2)},
    "ordered-dict": lambda: collections.OrderedDict(a=jnp.ones(2)),
    "empty-list": list,
    "partial": lambda: functools.partial(max, 1),
    "static-field-that-can-change": lambda: Pair(1, mode=Named("a")),
    "deep-list": lambda: Pair((1, Point(1, Pair([])))),
}


@pytest.mark.parametrize("name", KEEPABLE)
def test_structure_of_what_cannot_change_is_cacheable(name):
    assert structure_of(Pair(KEEPABLE[name]())).is_cacheable


@pytest.mark.parametrize("name", NOT_KEEPABLE)
def test_structure_of_what_can_change_is_not_keepable(name):
    assert not structure_of(Pair(NOT_KEEPABLE[name]())).is_cacheable


def test_sorts_name_what_the_nodes_are():
    structure = structure_of((jnp.ones(2), 1))
    assert [type(structure), *map(type, structure.children)] == [TupleNode, ArrayLeaf, StaticLeaf]


def test_structures_nested_10_000_deep_die_in_peace():
    tree = None
    for _ in range(10_000):
        tree = (tree,)
    reference = weakref.ref(structure_of(tree))
    gc.collect()
    assert reference() is None
