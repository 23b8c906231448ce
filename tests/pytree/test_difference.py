"""Messages for differences between trees, and for trees that are not a prefix of another tree."""

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


class Foreign:
    def __init__(self, *children, label=None):
        self.children, self.label = children, label


jtu.register_pytree_node(
    Foreign,
    lambda node: (node.children, node.label),
    lambda label, children: Foreign(*children, label=label),
)


def one_class_of_many():
    class Model(eqxlike.Module):
        pass

    return Model()


PAIR, FOREIGN = "a node of type Pair with", "a node of type Foreign with"
ORDERED = "a node of type OrderedDict with the keys"
ONE, TWO = collections.OrderedDict(a=True, b=True), collections.OrderedDict(b=1, a=2)
# Tuples (first, second, path, descriptions of both).
DIFFERENCES = [
    ({"a": [(1,)]}, {"a": [[1]]}, "['a'][0]", "a tuple of length 1", "a list of length 1"),
    ([[True]], [1], "[0]", "a list of length 1", "a leaf of type int"),
    ((True, None), (1, [2, 3]), "[1]", "None", "a list of length 2"),
    ({"a": True}, {"b": 1}, "", "a dict with the keys ['a']", "a dict with the keys ['b']"),
    (ONE, TWO, "", f"{ORDERED} ['a', 'b']", f"{ORDERED} ['b', 'a']"),
    (Pair(1, 1, "b", 2), Pair(1, 2), "", f"{PAIR} name='b', size=2", f"{PAIR} name='pair', size=1"),
    (Foreign(label=1), Foreign(), "", f"{FOREIGN} the metadata 1", f"{FOREIGN} the metadata None"),
    (Foreign(1), Foreign(1, 2), "", f"{FOREIGN} 1 child", f"{FOREIGN} 2 children"),
]


def test_difference_is_explained():
    for first, second, path, one, other in DIFFERENCES:
        found = find_difference(first, second).explain("first", "second")
        assert found == f"first{path} is {one}, and second{path} is {other}"
    found = find_difference([one_class_of_many()], [one_class_of_many()])
    expected = "first[0] and second[0] are both a node of type Model, but not the same one"
    assert found.explain("first", "second") == expected


TREES = trees_of(st.sampled_from([1, None]), max_leaves=5, max_size=2)


@given(TREES, TREES)
def test_trees_differ_exactly_if_their_treedefs_do(first, second):
    is_same = jtu.tree_structure(first) == jtu.tree_structure(second)
    assert (find_difference(first, second) is None) is is_same


@given(TREES)
def test_path_matches_jax(tree):
    for path, leaf in jtu.tree_leaves_with_path(tree):
        changed = eqxlike.tree_at(functools.partial(follow, path=path), tree, (2,))
        assert find_difference(tree, changed) == Difference(path, leaf, (2,))


ARRAYS = [
    np.ones(2, np.float32),
    np.ones(2),
    jnp.ones(2, jnp.float32),
    jax.ShapeDtypeStruct((2,), jnp.float32),
]


def test_matching_nodes_are_not_traversed_and_arrays_match_by_shape_and_dtype():
    def fits(first, second):
        return True if first is None else None

    assert find_difference([None, 1], [(2, 3), 4], fits) is None
    assert find_difference([None, 1], [(2, 3), [4]], fits).path == (jtu.SequenceKey(1),)
    for first, second in itertools.product(ARRAYS, repeat=2):
        assert find_difference({"a": first}, {"a": second}, same_shape_and_dtype) is None


def test_value_that_does_not_match_an_array_is_described():
    for other, text in [
        (jnp.ones(3), "an array of shape (3,) and dtype float32"),
        (jnp.ones(2, int), "an array of shape (2,) and dtype int32"),
        (2.0, "2.0"),
        (None, "None"),
        ([jnp.ones(2)], "a list of length 1"),
    ]:
        found = find_difference([jnp.ones(2)], [other], same_shape_and_dtype).explain("a", "b")
        assert found == f"a[0] is an array of shape (2,) and dtype float32, and b[0] is {text}"


@dataclasses.dataclass
class NoNode:
    value: int = dataclasses.field(default=1, metadata={"static": True})


def test_equal_values_of_different_types_are_described_by_their_types():
    for one, other, texts in [
        (Pair(1, 2, size=1), Pair(1, 2, size=True), (f"{PAIR} size=1", f"{PAIR} size=True")),
        (1, True, ("1", "True")),
        ("text", (), ("a leaf of type str", "a tuple of length 0")),
    ]:
        found = Difference((), one, other).explain("one", "other")
        assert found == f"one is {texts[0]}, and other is {texts[1]}"
    assert describe_node(NoNode()) == "a leaf of type NoNode"


# --- prefixes -------------------------------------------------------------------------------------


def pairs(*trees, is_leaf=None):
    names = ("prefix", "tree", "other")
    return map_prefix(lambda *leaves: leaves, *trees, names=names, hint="Mend it.", is_leaf=is_leaf)


@given(TREES, TREES)
def test_prefix_is_refused_exactly_if_jax_refuses_it(prefix, tree):
    try:
        expected = jtu.tree_map(lambda *leaves: leaves, prefix, tree)
    except ValueError:
        with pytest.raises(ValueError, match=r"^pytree structure error: .* is .*\. Mend it\.$"):
            pairs(prefix, tree)
    else:
        assert pairs(prefix, tree) == expected


def test_error_names_the_tree_and_the_path_of_the_mismatch():
    with pytest.raises(ValueError, match=r"error: prefix\[0\] is .*, and other\[0\] is a leaf"):
        pairs([[1]], [[2]], [3])
    # A leaf of the prefix is not traversed.
    trees = [(1,), [2]], [3, 4], [5, 6]
    with pytest.raises(ValueError, match=r"error: prefix\[1\] is .*, and tree\[1\]"):
        pairs(*trees, is_leaf=lambda node: isinstance(node, tuple))


def test_pattern_matches_paths():
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
