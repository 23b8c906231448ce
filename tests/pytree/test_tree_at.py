"""Laws of `tree_at`, and what it refuses; `test_tree_at_programs.py` compares it with Equinox."""

from typing import Any

import jax.numpy as jnp
import jax.tree_util as jtu
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

import eqxlike
from eqxlike import tree_at
from tests.beside_equinox import both
from tests.pytree.trees import Pair, follow, trees_of

TREES = trees_of(st.sampled_from([0, 1, 7, "", "ab"]), max_leaves=10, max_size=2)


def is_none(node):
    return node is None


@st.composite
def trees_with_paths(draw, num_paths=1):
    """A tree, and paths to nodes of it, none of which lies inside another."""
    tree = draw(TREES)
    paths = [path for path, _ in jtu.tree_leaves_with_path(tree)]
    assume(len(paths) >= num_paths)
    chosen = draw(
        st.lists(st.sampled_from(paths), min_size=num_paths, max_size=num_paths, unique=True)
    )
    if num_paths == 1:
        chosen = [chosen[0][: draw(st.integers(0, len(chosen[0])))]]
    return tree, chosen


def put(tree, path, value):
    return tree_at(lambda tree: follow(tree, path), tree, value)


@given(trees_with_paths())
def test_the_node_at_a_path_is_replaced_and_everything_else_shared(tree_and_path):
    tree, (path,) = tree_and_path
    before, value = jtu.tree_flatten(tree), object()
    assert follow(put(tree, path, value), path) is value
    assert jtu.tree_flatten(tree) == before
    others = [leaf for place, leaf in jtu.tree_leaves_with_path(tree) if place[: len(path)] != path]
    assert [*map(id, jtu.tree_leaves(put(tree, path, None)))] == [*map(id, others)]
    back = put(put(tree, path, value), path, follow(tree, path))
    assert eqxlike.tree_equal(back, tree, typematch=True)


@given(trees_with_paths(num_paths=2))
def test_two_replaced_at_once_are_two_replaced_in_turn(tree_and_paths):
    tree, (one, other) = tree_and_paths
    at_once = tree_at(lambda tree: (follow(tree, one), follow(tree, other)), tree, ("new", 7.5))
    in_turn = put(put(tree, one, "new"), other, 7.5)
    assert eqxlike.tree_equal(at_once, in_turn, typematch=True)


@both
def test_neither_converters_nor_checks_run(eqx):
    checked = []

    class Model(eqx.Module):
        x: Any = eqx.field(converter=float)

        def __check_init__(self):
            checked.append(self.x)

    assert eqx.tree_at(lambda module: module.x, Model(1), "text").x == "text"
    assert checked == [1.0]


def test_a_kept_partition_is_not_taken_over():
    read = eqxlike.filter_jit(lambda pair: pair.first * 1)
    pair = Pair(jnp.array(1.0), 2)
    read(pair)
    assert read(tree_at(lambda pair: pair.first, pair, jnp.array(5.0))) == 5


# --- errors ---------------------------------------------------------------------------------------


def pair(tree):
    return tree[0], tree[1]


ARRAY = jnp.ones(2)

# Each as (where, pytree, replace, the error, its message).
ERRORS = {
    "fewer values than nodes": (
        *(pair, [1, 2], (5,), ValueError),
        "same length as `replace`: it returned 2, and `replace` has 1",
    ),
    "one value for two nodes": (
        *(pair, [1, 2], 5, TypeError),
        "returned 2 nodes, so `replace` must be a sequence of 2 nodes; it is of type int",
    ),
    "a name": (*("weight", [1, 2], 5, TypeError), "`where` must be a function .*; got 'weight'"),
    "the tree first": (
        *(Pair(1, 2), lambda tree: tree.first, 5, TypeError),
        "is the first argument; got Pair",
    ),
    "no node": (
        *(lambda tree: 3, [1, 2], 5, TypeError),
        "`where` returned 3 of type int, which is not a node",
    ),
    "a static field beside a node": (
        *(lambda tree: (tree[0], tree[1].name), (1, Pair(1, 2)), (5, 6), TypeError),
        r"'pair', the value of the static field `name` of the Pair at tree\[1\]",
    ),
    "a node inside another": (
        *(lambda tree: (tree["a"], tree["a"][0]), {"a": [1], "b": 2}, (3, 4), ValueError),
        r"does not specify .* the node at tree\['a'\]\[0\] is inside another node",
    ),
    "nodes in nodes": (
        *(lambda tree: (pair(tree), tree[2]), [1, 2, 3], ((5, 6), 7), ValueError),
        "does not specify .* of type tuple, which contains nodes of the tree, but is not a node",
    ),
    "one None of two": (
        *(lambda tree: tree[0], [None, Pair(1, None)], 1, ValueError),
        r"2 times, at tree\[0\] and tree\[1\]\.second\. Pass `is_leaf=lambda node: node is None`",
    ),
    "looking inside a leaf": (
        *(lambda tree: tree["a"][1].first.shape, {"a": [1, Pair(2, 3)]}, 5, AttributeError),
        r"read the attribute 'shape' of the leaf at tree\['a'\]\[1\]\.first",
    ),
    "indexing a leaf": (
        *(lambda tree: tree[0][0], [ARRAY], 5, TypeError),
        "a _Placeholder stands for each leaf",
    ),
    "an error on the leaves themselves": (
        *(lambda tree: tree[0] if tree[0] else tree[1], [ARRAY, 2], 5, ValueError),
        "calls `where` a second time, on the leaves themselves",
    ),
}


@pytest.mark.parametrize("case", ERRORS)
def test_error_says_what_came_and_where(case):
    where, tree, replace, error, message = ERRORS[case]
    with pytest.raises(error, match=message):
        tree_at(where, tree, replace)


@both
def test_precisely_one_of_replace_and_replace_fn_is_needed(eqx):
    for options in ({}, {"replace": 1, "replace_fn": str}):
        with pytest.raises(ValueError, match="Precisely one of `replace` and `replace_fn`"):
            eqx.tree_at(lambda tree: tree[0], [1, 2], **options)


def test_an_error_that_is_not_of_a_leaf_is_left_alone():
    with pytest.raises(TypeError, match="'tuple' object is not callable") as caught:
        tree_at(lambda tree: tree[0](), [(1, 2)], 5)
    assert not hasattr(caught.value, "__notes__")


CHANGES = {
    "puts": lambda tree: tree.update(a=5),
    "adds an empty list": lambda tree: tree.update(c=[]),
    "takes out a None": lambda tree: tree.pop("none"),
    "moves": lambda tree: tree.update(a=tree["b"], b=tree["a"]),
    "moves an empty tuple": lambda tree: tree.update(empty=tree["a"], a=tree["empty"]),
}


@pytest.mark.parametrize("change", CHANGES)
def test_where_must_not_change_the_tree(change):
    def where(tree):
        node = tree["a"]
        CHANGES[change](tree)
        return node

    with pytest.raises(ValueError, match="`where` must not change the pytree on which it is"):
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
    "is None": lambda tree: tree[0] if tree[2] is None else tree[1],
}


@both
def test_choosing_by_what_the_leaves_are_is_an_error(eqx):
    for where in DEPENDENT.values():
        with pytest.raises(ValueError, match="`where` must not depend on the leaves"):
            eqx.tree_at(where, [0, ARRAY, None], replace_fn=lambda node: 5, is_leaf=is_none)
