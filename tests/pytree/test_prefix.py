"""What the functions on several trees say where one is no prefix of the other."""

import collections
import functools
from typing import Any, NamedTuple

import jax.tree_util as jtu
import pytest
from hypothesis import given
from hypothesis import strategies as st

import eqxlike
from eqxlike._pytree._prefix import explain_mismatch


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


# Each as (prefix, tree, what the message says of both).
MISMATCHES = {
    "another type": (
        {"a": [(True,), True]},
        {"a": [[1], 2]},
        "prefix['a'][0] is a node of type tuple with 1 child, "
        "and tree['a'][0] is a node of type list with 1 child.",
    ),
    "a leaf": (
        [[True]],
        [1],
        "prefix[0] is a node of type list with 1 child, and tree[0] is a leaf of type int.",
    ),
    "None in the prefix": (
        (True, None),
        (1, [2, 3]),
        "prefix[1] is None, and tree[1] is a node of type list with 2 children.",
    ),
    "None in the tree": (
        (True, [True]),
        (1, None),
        "prefix[1] is a node of type list with 1 child, and tree[1] is None.",
    ),
    "another length": (
        Pair(True, [True]),
        Pair(1, [2, 3]),
        "prefix.second is a node of type list with 1 child, "
        "and tree.second is a node of type list with 2 children.",
    ),
    "another key": (
        {"a": True},
        {"b": 1},
        "prefix is a node of type dict with the keys ['a'], "
        "and tree is a node of type dict with the keys ['b'].",
    ),
    "another order of keys": (
        collections.OrderedDict(a=True, b=True),
        collections.OrderedDict(b=1, a=2),
        "prefix is a node of type OrderedDict with the keys ['a', 'b'], "
        "and tree is a node of type OrderedDict with the keys ['b', 'a'].",
    ),
    "another static field": (
        [Pair(True, True, "couple")],
        [Pair(1, 2)],
        "prefix[0] is a node of type Pair with name='couple', "
        "and tree[0] is a node of type Pair with name='pair'.",
    ),
    "other static fields": (
        Pair(True, True, "couple", 2),
        Pair(1, 2),
        "prefix is a node of type Pair with name='couple', size=2, "
        "and tree is a node of type Pair with name='pair', size=1.",
    ),
    "other metadata of a foreign node": (
        Foreign(True, "a"),
        Foreign(1, "b"),
        "prefix is a node of type Foreign with metadata='a', "
        "and tree is a node of type Foreign with metadata='b'.",
    ),
    "the second field of a namedtuple": (
        Point(True, [True]),
        Point(1, 2),
        "prefix.y is a node of type list with 1 child, and tree.y is a leaf of type int.",
    ),
    "the first of several": (
        [(True,), (True,)],
        [[1], [1]],
        "prefix[0] is a node of type tuple with 1 child, "
        "and tree[0] is a node of type list with 1 child.",
    ),
}


@pytest.mark.parametrize("case", MISMATCHES)
def test_mismatch_is_explained(case):
    prefix, tree, message = MISMATCHES[case]
    assert explain_mismatch(prefix, tree, ("prefix", "tree")) == message


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
def test_mismatch_is_explained_just_where_jax_finds_one(prefix, tree):
    try:
        jtu.tree_map(lambda *_: 0, prefix, tree)
        is_prefix = True
    except ValueError:
        is_prefix = False
    assert (explain_mismatch(prefix, tree, ("prefix", "tree")) is None) is is_prefix


def test_what_is_a_leaf_of_the_prefix_is_not_entered():
    names = ("prefix", "tree")
    assert explain_mismatch([(1,)], [2], names, is_leaf=lambda x: isinstance(x, tuple)) is None


# --- the functions that say so --------------------------------------------------------------------


@pytest.mark.parametrize("function", [eqxlike.filter, eqxlike.partition])
def test_a_specification_that_is_no_prefix_is_named_with_the_place(function):
    expected = r"filter_spec\.second is None, and pytree\.second is .* must be a prefix of `pytree`"
    with pytest.raises(ValueError, match=expected):
        function(Pair(1, [2]), Pair(True, None))


def test_a_predicate_that_is_a_pytree_is_advised_to_be_wrapped():
    with pytest.raises(ValueError, match="counts as a node: wrap it in a lambda"):
        eqxlike.filter([1, 2], jtu.Partial(callable))


def test_a_predicate_that_is_no_pytree_needs_no_wrapping():
    assert eqxlike.filter([1, len], functools.partial(callable)) == [None, len]


def test_the_tree_that_cannot_be_combined_is_named_with_the_place():
    expected = r"pytrees\[0\]\['a'\] is a node .* and pytrees\[2\]\['a'\] is a leaf of type int"
    with pytest.raises(ValueError, match=expected):
        eqxlike.combine({"a": [1]}, {"a": [None]}, {"a": 2})


def test_updates_of_another_structure_are_named_with_the_place():
    expected = r"updates\[0\] is a node of type list with 1 child, and model\[0\] is a leaf"
    with pytest.raises(ValueError, match=expected):
        eqxlike.apply_updates([1.0], [[2.0]])


def test_an_error_of_the_predicate_is_left_alone():
    def predicate(leaf):
        raise ValueError("mine")

    with pytest.raises(ValueError, match=r"^mine$"):
        eqxlike.filter([1, 2], [predicate, True])
