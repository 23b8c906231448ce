"""Where two trees differ, and how a message says so."""

import collections
import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import eqxlike
from eqxlike._pytree import Difference, describe_node, find_difference, same_shape_and_dtype


class Point(NamedTuple):
    x: Any
    y: Any


class Pair(eqxlike.Module):
    first: Any
    second: Any
    name: str = eqxlike.field(static=True, default="pair")
    size: int = eqxlike.field(static=True, default=1)


@jtu.register_pytree_node_class
class Foreign:
    def __init__(self, value, label):
        self.value, self.label = value, label

    def tree_flatten(self):
        return (self.value,), self.label

    @classmethod
    def tree_unflatten(cls, label, children):
        return cls(*children, label)


@jtu.register_pytree_node_class
class Children:
    def __init__(self, *children):
        self.children = children

    def tree_flatten(self):
        return self.children, None

    @classmethod
    def tree_unflatten(cls, _, children):
        return cls(*children)


def one_class_of_many():
    class Model(eqxlike.Module):
        pass

    return Model()


# Each as (first, second, what a message says of both).
DIFFERENCES = {
    "another type": (
        {"a": [(True,), True]},
        {"a": [[1], 2]},
        "first['a'][0] is a tuple of length 1, and second['a'][0] is a list of length 1",
    ),
    "a leaf": (
        [[True]],
        [1],
        "first[0] is a list of length 1, and second[0] is a leaf of type int",
    ),
    "None in the first": (
        (True, None),
        (1, [2, 3]),
        "first[1] is None, and second[1] is a list of length 2",
    ),
    "None in the second": (
        (True, [True]),
        (1, None),
        "first[1] is a list of length 1, and second[1] is None",
    ),
    "another length": (
        Pair(True, [True]),
        Pair(1, [2, 3]),
        "first.second is a list of length 1, and second.second is a list of length 2",
    ),
    "another key": (
        {"a": True},
        {"b": 1},
        "first is a dict with the keys ['a'], and second is a dict with the keys ['b']",
    ),
    "another order of keys": (
        collections.OrderedDict(a=True, b=True),
        collections.OrderedDict(b=1, a=2),
        "first is a node of type OrderedDict with the keys ['a', 'b'], "
        "and second is a node of type OrderedDict with the keys ['b', 'a']",
    ),
    "another static field": (
        [Pair(True, True, "couple")],
        [Pair(1, 2)],
        "first[0] is a node of type Pair with name='couple', "
        "and second[0] is a node of type Pair with name='pair'",
    ),
    "other static fields": (
        Pair(True, True, "couple", 2),
        Pair(1, 2),
        "first is a node of type Pair with name='couple', size=2, "
        "and second is a node of type Pair with name='pair', size=1",
    ),
    "other metadata of a foreign node": (
        Foreign(True, "a"),
        Foreign(1, "b"),
        "first is a node of type Foreign with the metadata 'a', "
        "and second is a node of type Foreign with the metadata 'b'",
    ),
    "the second field of a namedtuple": (
        Point(True, [True]),
        Point(1, 2),
        "first.y is a list of length 1, and second.y is a leaf of type int",
    ),
    "the first of several": (
        [(True,), (True,)],
        [[1], [1]],
        "first[0] is a tuple of length 1, and second[0] is a list of length 1",
    ),
    "another number of children": (
        Children(1),
        Children(1, 2),
        "first is a node of type Children with 1 child, "
        "and second is a node of type Children with 2 children",
    ),
    "two classes of one name": (
        [one_class_of_many()],
        [one_class_of_many()],
        "first[0] and second[0] are both a node of type Model, but not the same one",
    ),
}


@pytest.mark.parametrize("case", DIFFERENCES)
def test_difference_is_explained(case):
    first, second, message = DIFFERENCES[case]
    assert find_difference(first, second).explain("first", "second") == message


TREES = st.recursive(
    st.sampled_from([1, None]),
    lambda trees: (
        st.lists(trees, max_size=2)
        | st.lists(trees, max_size=2).map(tuple)
        | st.dictionaries(st.sampled_from("ab"), trees)
        | st.builds(Point, trees, trees)
        | st.builds(Pair, trees, trees, st.sampled_from("ab"))
    ),
    max_leaves=5,
)


@given(TREES, TREES)
def test_trees_differ_just_where_their_treedefs_do(first, second):
    is_same = jtu.tree_structure(first) == jtu.tree_structure(second)
    assert (find_difference(first, second) is None) is is_same


@given(TREES)
def test_path_is_that_of_jax(tree):
    for path, leaf in jtu.tree_leaves_with_path(tree):
        assert leaf == 1
        changed = eqxlike.tree_at(functools.partial(_node_at, path), tree, (2,))
        assert find_difference(tree, changed) == Difference(path, 1, (2,))


def _node_at(path, tree):
    for key in path:
        if isinstance(key, jtu.GetAttrKey):
            tree = getattr(tree, key.name)
        else:
            tree = tree[key.key if isinstance(key, jtu.DictKey) else key.idx]
    return tree


def test_what_fits_is_not_entered():
    def fits(first, second):
        return True if first is None else None

    assert find_difference([None, 1], [(2, 3), 4], fits) is None
    assert find_difference([None, 1], [(2, 3), [4]], fits).path == (jtu.SequenceKey(1),)


ARRAYS = {
    "NumPy's": np.ones(2, np.float32),
    "NumPy's of 64 bits": np.ones(2),
    "JAX's": jnp.ones(2, jnp.float32),
    "struct": jax.ShapeDtypeStruct((2,), jnp.float32),
}


@pytest.mark.parametrize("second", ARRAYS)
@pytest.mark.parametrize("first", ARRAYS)
def test_arrays_of_one_shape_and_dtype_fit_whoever_made_them(first, second):
    trees = ({"a": ARRAYS[first]}, {"a": ARRAYS[second]})
    assert find_difference(*trees, same_shape_and_dtype) is None


@pytest.mark.parametrize(
    ("other", "text"),
    [
        (jnp.ones(3), "an array of shape (3,) and dtype float32"),
        (jnp.ones(2, int), "an array of shape (2,) and dtype int32"),
        (2.0, "2.0"),
        (None, "None"),
        ([jnp.ones(2)], "a list of length 1"),
    ],
)
def test_what_does_not_fit_an_array_is_described(other, text):
    difference = find_difference([jnp.ones(2)], [other], same_shape_and_dtype)
    assert difference.explain("old", "new") == (
        f"old[0] is an array of shape (2,) and dtype float32, and new[0] is {text}"
    )


def test_static_fields_that_are_equal_and_of_two_types_are_told_apart():
    difference = Difference((), Pair(1, 2, size=1), Pair(1, 2, size=True))
    assert difference.explain("one", "other") == (
        "one is a node of type Pair with size=1, and other is a node of type Pair with size=True"
    )


def test_leaves_are_shown_beside_leaves_and_their_types_beside_nodes():
    shown = Difference((), 1, True).explain("one", "other")
    assert shown == "one is 1, and other is True"
    shown = Difference((), "text", ()).explain("one", "other")
    assert shown == "one is a leaf of type str, and other is a tuple of length 0"


@dataclasses.dataclass
class NoNode:
    value: int = dataclasses.field(default=1, metadata={"static": True})


def test_dataclass_that_is_no_node_is_a_leaf():
    assert describe_node(NoNode()) == "a leaf of type NoNode"
