"""What the functions on several trees say where one is no prefix of the other."""

import functools

import jax.tree_util as jtu
import pytest
from hypothesis import given
from hypothesis import strategies as st

import eqxlike
from eqxlike._pytree._prefix import map_prefix
from tests.pytree.trees import Pair, trees_of

TREES = trees_of(st.sampled_from([1, None]), max_leaves=5, max_size=2)


def pairs(*trees, is_leaf=None):
    return map_prefix(
        lambda *leaves: leaves,
        *trees,
        names=("prefix", "tree", "other"),
        advice="Mend it.",
        is_leaf=is_leaf,
    )


@given(TREES, TREES)
def test_difference_is_explained_just_where_jax_finds_one(prefix, tree):
    try:
        expected = jtu.tree_map(lambda *leaves: leaves, prefix, tree)
    except ValueError:
        with pytest.raises(ValueError, match=r"^pytree structure error: .* is .*\. Mend it\.$"):
            pairs(prefix, tree)
    else:
        assert pairs(prefix, tree) == expected


def test_what_is_a_leaf_of_the_prefix_is_not_entered():
    trees = [(1,), [2]], [3, 4], [5, 6]
    with pytest.raises(ValueError, match=r"error: prefix\[1\] is .*, and tree\[1\]"):
        pairs(*trees, is_leaf=lambda node: isinstance(node, tuple))


def test_tree_that_the_prefix_does_not_fit_is_named():
    with pytest.raises(ValueError, match=r"error: prefix\[0\] is .*, and other\[0\] is a leaf"):
        pairs([[1]], [[2]], [3])


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
    expected = r"pytrees\[0\]\['a'\] is a list .* and pytrees\[2\]\['a'\] is a leaf of type int"
    with pytest.raises(ValueError, match=expected):
        eqxlike.combine({"a": [1]}, {"a": [None]}, {"a": 2})


def test_updates_of_another_structure_are_named_with_the_place():
    expected = r"updates\[0\] is a list of length 1, and model\[0\] is a leaf of type float"
    with pytest.raises(ValueError, match=expected):
        eqxlike.apply_updates([1.0], [[2.0]])


def test_an_error_of_the_predicate_is_left_alone():
    def predicate(leaf):
        raise ValueError("mine")

    with pytest.raises(ValueError, match=r"^mine$"):
        eqxlike.filter([1, 2], [predicate, True])
