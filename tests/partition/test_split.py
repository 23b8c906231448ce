"""Taking leaves out of a tree and putting others in their places."""

import weakref

import jax.numpy as jnp
import jax.tree_util as jtu
from hypothesis import given
from hypothesis import strategies as st

from eqxlike._partition import split, split_leaves

trees = st.recursive(
    st.integers() | st.text(max_size=2) | st.none(),
    lambda trees: (
        st.lists(trees, max_size=3)
        | st.tuples(trees, trees)
        | st.dictionaries(st.sampled_from("ab"), trees)
    ),
    max_leaves=8,
)


def is_int(leaf):
    return isinstance(leaf, int)


@given(trees)
def test_merge_undoes_split(tree):
    dynamic, rest = split(tree, is_int)
    assert rest.merge(dynamic) == tree


@given(trees)
def test_what_is_taken_are_the_leaves_asked_for_in_tree_order(tree):
    dynamic, _ = split(tree, is_int)
    assert dynamic == [leaf for leaf in jtu.tree_leaves(tree) if is_int(leaf)]


@given(trees)
def test_leaves_are_those_of_the_merged_tree(tree):
    dynamic, rest = split(tree, is_int)
    others = [f"other {number}" for number in range(len(dynamic))]
    assert rest.leaves(others) == jtu.tree_leaves(rest.merge(others))


@given(trees)
def test_merge_into_has_one_value_for_all_that_was_not_taken(tree):
    dynamic, rest = split(tree, is_int)
    expected = jtu.tree_map(lambda leaf: leaf if is_int(leaf) else "other", tree)
    assert rest.merge_into("other", dynamic) == expected


@given(trees)
def test_take_gives_what_stands_in_the_places_of_the_leaves_taken(tree):
    dynamic, rest = split(tree, is_int)
    assert rest.take(jtu.tree_leaves(tree)) == dynamic


@given(trees)
def test_split_leaves_is_split_by_a_mask(tree):
    leaves, treedef = jtu.tree_flatten(tree)
    dynamic, rest = split_leaves(leaves, treedef, list(map(is_int, leaves)))
    assert (dynamic, rest.merge(dynamic)) == (split(tree, is_int)[0], tree)


def test_arrays_are_taken_by_default():
    dynamic, rest = split({"a": jnp.arange(2), "b": 3})
    assert (len(dynamic), rest.merge(["array"])) == (1, {"a": "array", "b": 3})


def test_the_rest_holds_no_leaf_that_was_taken():
    class Leaf:
        pass

    leaf = Leaf()
    reference = weakref.ref(leaf)
    dynamic, rest = split([leaf, 1], lambda leaf: not is_int(leaf))
    del leaf, dynamic
    assert (reference(), rest.merge(["new"])) == (None, ["new", 1])


def test_shows_the_structure():
    assert repr(split({"a": 1})[1]) == "Rest(PyTreeDef({'a': *}))"
