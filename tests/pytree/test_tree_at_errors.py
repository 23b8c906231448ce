"""What `tree_at` refuses, and what it says then: where a test takes `eqx`, Equinox says so too."""

from typing import Any

import jax.numpy as jnp
import pytest

import eqxlike
from eqxlike import tree_at
from tests.beside_equinox import both


class Pair(eqxlike.Module):
    first: Any
    second: Any
    name: str = eqxlike.field(static=True, default="pair")


def is_none(node):
    return node is None


@both
@pytest.mark.parametrize("kwargs", [{}, {"replace": 1, "replace_fn": str}], ids=["neither", "both"])
def test_precisely_one_of_replace_and_replace_fn_is_needed(eqx, kwargs):
    with pytest.raises(ValueError, match="Precisely one of `replace` and `replace_fn`"):
        eqx.tree_at(lambda tree: tree[0], [1, 2], **kwargs)


@both
def test_fewer_values_than_nodes_is_an_error(eqx):
    with pytest.raises(ValueError, match="same length as `replace`"):
        eqx.tree_at(lambda tree: (tree[0], tree[1]), [1, 2], (5,))


def test_the_error_of_a_wrong_number_of_values_names_both_numbers():
    with pytest.raises(ValueError, match="it returned 2, and `replace` has 1"):
        tree_at(lambda tree: (tree[0], tree[1]), [1, 2], (5,))


def test_one_value_for_several_nodes_is_an_error_that_names_its_type():
    expected = "returned 2 nodes, so `replace` must be a sequence of as many; it is of type int"
    with pytest.raises(TypeError, match=expected):
        tree_at(lambda tree: (tree[0], tree[1]), [1, 2], 5)


def test_the_error_of_what_is_no_node_says_what_came():
    with pytest.raises(TypeError, match="`where` returned 3 of type int, which is not a node"):
        tree_at(lambda tree: 3, [1, 2], 5)


@pytest.mark.parametrize(
    "where",
    [lambda pair: pair[1].name, lambda pair: (pair[0], pair[1].name)],
    ids=["alone", "beside a node"],
)
def test_the_error_of_a_static_field_names_it_and_its_place(where):
    expected = r"'pair', the value of the static field `name` of the Pair at tree\[1\]"
    with pytest.raises(TypeError, match=expected):
        tree_at(where, (1, Pair(1, 2)), (5, 6))


@both
@pytest.mark.parametrize(
    "where",
    [lambda tree: (tree[0], tree[0][0]), lambda tree: (tree[0][0], tree[0])],
    ids=["outer first", "inner first"],
)
def test_a_node_inside_another_is_an_error(eqx, where):
    with pytest.raises(ValueError, match="does not specify an element or elements of `pytree`"):
        eqx.tree_at(where, [[1], 2], (3, 4))


def test_the_error_of_a_node_inside_another_names_its_path():
    with pytest.raises(ValueError, match=r"the node at tree\['a'\]\[0\] lies inside another one"):
        tree_at(lambda tree: (tree["a"], tree["a"][0]), {"a": [1], "b": 2}, (3, 4))


@both
def test_a_nested_sequence_of_nodes_is_an_error(eqx):
    with pytest.raises(ValueError, match="does not specify an element or elements of `pytree`"):
        eqx.tree_at(lambda tree: ((tree[0], tree[1]), tree[2]), [1, 2, 3], ((5, 6), 7))


@both
def test_one_none_of_two_is_an_error_that_says_to_make_it_a_leaf(eqx):
    with pytest.raises(ValueError, match=r"(?s)does not uniquely identify .*is_leaf=lambda"):
        eqx.tree_at(lambda tree: tree[0], [None, None], 1)


def test_the_error_of_one_none_of_two_names_both():
    with pytest.raises(
        ValueError, match=r"stands in it 2 times, at tree\[0\] and tree\[1\]\.second"
    ):
        tree_at(lambda tree: tree[0], [None, Pair(1, None)], 1)


@both
def test_calculating_with_a_leaf_is_an_error(eqx):
    with pytest.raises(TypeError, match="unsupported operand"):
        eqx.tree_at(lambda tree: tree[0] + 1, [1, 2], 5)


@both
@pytest.mark.parametrize("name", ["shape", "T", "dtype"])
def test_looking_inside_a_leaf_is_an_error(eqx, name):
    with pytest.raises(AttributeError, match=name):
        eqx.tree_at(lambda tree: getattr(tree[0], name), [jnp.ones(2), 2], 5)


def test_the_error_of_looking_inside_a_leaf_names_its_path_and_the_attribute():
    expected = r"asked the leaf at tree\['a'\]\[1\]\.first for 'shape'"
    with pytest.raises(AttributeError, match=expected):
        tree_at(lambda tree: tree["a"][1].first.shape, {"a": [1, Pair(2, 3)]}, 5)


@pytest.mark.parametrize(
    "where",
    [lambda tree: tree[0] + 1, lambda tree: tree[0][0], lambda tree: tree[0]()],
    ids=["adds", "indexes", "calls"],
)
def test_the_error_of_using_a_leaf_says_that_it_is_a_placeholder(where):
    with pytest.raises(TypeError, match="a _Placeholder stands for each leaf"):
        tree_at(where, [jnp.ones(2)], 5)


def test_an_error_that_is_not_of_a_leaf_is_left_alone():
    with pytest.raises(TypeError, match="'tuple' object is not callable") as caught:
        tree_at(lambda tree: tree[0](), [(1, 2)], 5)
    assert not hasattr(caught.value, "__notes__")


def test_an_error_of_the_leaves_themselves_says_which_call_it_was():
    with pytest.raises(ValueError, match="calls `where` a second time, on the leaves themselves"):
        tree_at(lambda tree: tree[0] if tree[0] else tree[1], [jnp.ones(2), 2], 5)


def move(tree):
    tree["a"], tree["b"] = tree["b"], tree["a"]


CHANGES = {
    "puts": lambda tree: tree.update(a=5),
    "adds": lambda tree: tree.update(c=5),
    "adds an empty list": lambda tree: tree.update(c=[]),
    "takes out": lambda tree: tree.pop("b"),
    "takes out a None": lambda tree: tree.pop("none"),
    "moves": move,
    "moves an empty tuple": lambda tree: tree.update(empty=tree["a"], a=tree["empty"]),
}


@pytest.mark.parametrize("change", CHANGES)
def test_where_must_not_change_the_tree(change):
    def where(tree):
        node = tree["a"]
        CHANGES[change](tree)
        return node

    with pytest.raises(ValueError, match="`where` must not change the pytree it is called on"):
        tree_at(where, {"a": 1, "b": [2], "empty": (), "none": None}, 5)


def test_what_where_does_to_the_tree_does_not_reach_that_of_the_caller():
    tree, calls = [1, 2], []

    def where(tree):
        calls.append(tree)
        if len(calls) == 2:
            tree.append(3)
        return tree[0]

    assert tree_at(where, tree, 5) == [5, 2]
    assert tree == [1, 2]


# Each is a function from a tree of a 0, an array and a `None` which hangs on what the leaves are.
DEPENDENT = {
    "truth": lambda tree: tree[0] if tree[0] else tree[1],
    "equality": lambda tree: tree[0] if tree[0] == 0 else tree[1],
    "type": lambda tree: [leaf for leaf in tree if isinstance(leaf, int)],
    "is_array": lambda tree: [leaf for leaf in tree if eqxlike.is_array(leaf)],
    "is None": lambda tree: tree[0] if tree[2] is None else tree[1],
}


@both
@pytest.mark.parametrize("how", DEPENDENT)
def test_choosing_by_what_the_leaves_are_is_an_error(eqx, how):
    with pytest.raises(ValueError, match="`where` must not depend on the leaves"):
        eqx.tree_at(
            DEPENDENT[how], [0, jnp.ones(2), None], replace_fn=lambda node: 5, is_leaf=is_none
        )
