"""Where two trees differ, where one is not a prefix of another, and how a message says so."""

import collections
import dataclasses
import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import eqxlike
from eqxlike._pytree import (
    Difference,
    describe_node,
    find_difference,
    path_matches,
    same_shape_and_dtype,
)
from eqxlike._pytree._difference import map_prefix
from tests.pytree.trees import follow, trees_of


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


class Children:
    """Of any number, without metadata."""

    def __init__(self, *children):
        self.children = children


jtu.register_pytree_node(
    Children, lambda it: (it.children, None), lambda _, children: Children(*children)
)


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


def test_difference_is_explained():
    for first, second, message in DIFFERENCES.values():
        assert find_difference(first, second).explain("first", "second") == message


TREES = trees_of(st.sampled_from([1, None]), max_leaves=5, max_size=2)


@given(TREES, TREES)
def test_trees_differ_just_where_their_treedefs_do(first, second):
    is_same = jtu.tree_structure(first) == jtu.tree_structure(second)
    assert (find_difference(first, second) is None) is is_same


@given(TREES)
def test_path_is_that_of_jax(tree):
    for path, leaf in jtu.tree_leaves_with_path(tree):
        changed = eqxlike.tree_at(functools.partial(follow, path=path), tree, (2,))
        assert find_difference(tree, changed) == Difference(path, leaf, (2,))


def test_what_fits_is_not_entered():
    def fits(first, second):
        return True if first is None else None

    assert find_difference([None, 1], [(2, 3), 4], fits) is None
    assert find_difference([None, 1], [(2, 3), [4]], fits).path == (jtu.SequenceKey(1),)


ARRAYS = [
    np.ones(2, np.float32),
    np.ones(2),
    jnp.ones(2, jnp.float32),
    jax.ShapeDtypeStruct((2,), jnp.float32),
]


def test_arrays_of_one_shape_and_dtype_fit_whoever_made_them():
    for first, second in itertools.product(ARRAYS, repeat=2):
        assert find_difference({"a": first}, {"a": second}, same_shape_and_dtype) is None


def test_what_does_not_fit_an_array_is_described():
    for other, text in [
        (jnp.ones(3), "an array of shape (3,) and dtype float32"),
        (jnp.ones(2, int), "an array of shape (2,) and dtype int32"),
        (2.0, "2.0"),
        (None, "None"),
        ([jnp.ones(2)], "a list of length 1"),
    ]:
        difference = find_difference([jnp.ones(2)], [other], same_shape_and_dtype)
        assert difference.explain("old", "new") == (
            f"old[0] is an array of shape (2,) and dtype float32, and new[0] is {text}"
        )


@dataclasses.dataclass
class NoNode:
    value: int = dataclasses.field(default=1, metadata={"static": True})


def test_values_are_told_apart_by_their_types():
    difference = Difference((), Pair(1, 2, size=1), Pair(1, 2, size=True))
    assert difference.explain("one", "other") == (
        "one is a node of type Pair with size=1, and other is a node of type Pair with size=True"
    )
    shown = Difference((), 1, True).explain("one", "other")
    assert shown == "one is 1, and other is True"
    shown = Difference((), "text", ()).explain("one", "other")
    assert shown == "one is a leaf of type str, and other is a tuple of length 0"
    assert describe_node(NoNode()) == "a leaf of type NoNode"


# --- prefixes -------------------------------------------------------------------------------------


def pairs(*trees, is_leaf=None):
    names = ("prefix", "tree", "other")
    return map_prefix(lambda *leaves: leaves, *trees, names=names, hint="Mend it.", is_leaf=is_leaf)


@given(TREES, TREES)
def test_what_is_no_prefix_is_explained_just_where_jax_finds_one(prefix, tree):
    try:
        expected = jtu.tree_map(lambda *leaves: leaves, prefix, tree)
    except ValueError:
        with pytest.raises(ValueError, match=r"^pytree structure error: .* is .*\. Mend it\.$"):
            pairs(prefix, tree)
    else:
        assert pairs(prefix, tree) == expected


def test_the_tree_that_the_prefix_does_not_fit_is_named_with_the_place():
    with pytest.raises(ValueError, match=r"error: prefix\[0\] is .*, and other\[0\] is a leaf"):
        pairs([[1]], [[2]], [3])
    # What is a leaf of the prefix is not entered.
    trees = [(1,), [2]], [3, 4], [5, 6]
    with pytest.raises(ValueError, match=r"error: prefix\[1\] is .*, and tree\[1\]"):
        pairs(*trees, is_leaf=lambda node: isinstance(node, tuple))


def test_pattern_means_these_paths():
    leaf = jax.ShapeDtypeStruct((2, 3), jnp.float32)
    for pattern, path, expected in [
        ("layers[0].weight", "layers[0].weight", True),
        ("layers[0].weight", "layers[0].weights", False),
        ("layers[0].weight", "layers0.weight", False),
        ("layers[*].weight", "layers[11].weight", True),
        ("layers[*].weight", "layers[0].inner[1].weight", False),
        ("layers.*.weight", "layers[11].weight", True),
        ("layers.*.weight", "layers[0].inner[1].weight", False),
        ("layers.0.a.weight", "layers[0]['a'].weight", True),
        ("**.weight", "weight", True),
        ("**.weight", "layers[0].weight", True),
        ("**.weight", "layers[0].gate_weight", False),
        ("*", "layers[0]", False),
        ("**", "", True),
        ("**.weight", "layers[0].inner['a'].weight", True),
        (lambda path, leaf: leaf.ndim == 2, "anything", True),
        (lambda path, leaf: path.endswith("bias"), "weight", False),
    ]:
        assert path_matches(pattern, path, leaf) is expected
