"""Laws and errors of `tree_at`, and short programs that compare `tree_at` with Equinox."""

import collections
from typing import Any

import equinox
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

import eqxlike
from eqxlike import tree_at
from tests.beside_equinox import both, output
from tests.pytree.trees import Pair, follow, trees_of

TREES = trees_of(st.sampled_from([0, 1, 7, "", "ab"]), max_leaves=10, max_size=2)


def is_none(node):
    return node is None


@st.composite
def trees_with_paths(draw, num_paths=1):
    """A tree, and paths of disjoint nodes."""
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
def test_node_at_a_path_is_replaced_and_the_rest_is_shared(tree_and_path):
    tree, (path,) = tree_and_path
    before, value = jtu.tree_flatten(tree), object()
    assert follow(put(tree, path, value), path) is value
    assert jtu.tree_flatten(tree) == before
    others = [leaf for place, leaf in jtu.tree_leaves_with_path(tree) if place[: len(path)] != path]
    assert [*map(id, jtu.tree_leaves(put(tree, path, None)))] == [*map(id, others)]
    back = put(put(tree, path, value), path, follow(tree, path))
    assert eqxlike.tree_equal(back, tree, typematch=True)


@given(trees_with_paths(num_paths=2))
def test_replacing_two_nodes_at_once_equals_replacing_them_in_turn(tree_and_paths):
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


def test_new_tree_does_not_inherit_the_cached_partition():
    read = eqxlike.filter_jit(lambda pair: pair.first * 1)
    pair = Pair(jnp.array(1.0), 2)
    read(pair)
    assert read(tree_at(lambda pair: pair.first, pair, jnp.array(5.0))) == 5


# --- errors ---------------------------------------------------------------------------------------


def pair(tree):
    return tree[0], tree[1]


ARRAY = jnp.ones(2)
TWO_NONE = [None, Pair(1, None)]
# Tuples (where, pytree, replace, error, message).
ERRORS = [
    (pair, [1, 2], (5,), ValueError, "same length as `replace`: it returned 2, and .* has 1"),
    (
        pair,
        [1, 2],
        5,
        TypeError,
        "returned 2 nodes, so `replace` must be a sequence .* of type int",
    ),
    ("weight", [1, 2], 5, TypeError, "`where` must be a function .*; got 'weight'"),
    (Pair(1, 2), lambda tree: tree.first, 5, TypeError, "is the first argument; got Pair"),
    (lambda t: 3, [1, 2], 5, TypeError, "`where` returned 3 of type int, which is not a node"),
    (
        *(lambda t: (t[0], t[1].name), (1, Pair(1, 2)), (5, 6), TypeError),
        r"'pair', the value of the static field `name` of the Pair at tree\[1\]",
    ),
    (
        *(lambda t: (t["a"], t["a"][0]), {"a": [1], "b": 2}, (3, 4), ValueError),
        r"does not specify .* the node at tree\['a'\]\[0\] is inside another node",
    ),
    (
        *(lambda t: (pair(t), t[2]), [1, 2, 3], ((5, 6), 7), ValueError),
        "does not specify .* of type tuple, which contains nodes of the tree, but is not a node",
    ),
    (
        *(lambda t: t[0], TWO_NONE, 1, ValueError),
        r"2 times, at tree\[0\] and tree\[1\]\.second\. Pass `is_leaf=lambda node: node is None`",
    ),
    (
        *(lambda t: t["a"][1].first.shape, {"a": [1, Pair(2, 3)]}, 5, AttributeError),
        r"read the attribute 'shape' of the leaf at tree\['a'\]\[1\]\.first",
    ),
    (lambda t: t[0][0], [ARRAY], 5, TypeError, "a _Placeholder stands for each leaf"),
    (
        lambda t: t[0] or t[1],
        [ARRAY, 2],
        5,
        ValueError,
        "`where` a second time, on the leaves them",
    ),
]


@pytest.mark.parametrize(("where", "tree", "replace", "error", "message"), ERRORS)
def test_error_names_node_and_place(where, tree, replace, error, message):
    with pytest.raises(error, match=message):
        tree_at(where, tree, replace)


@both
def test_precisely_one_of_replace_and_replace_fn_is_needed(eqx):
    for options in ({}, {"replace": 1, "replace_fn": str}):
        with pytest.raises(ValueError, match="Precisely one of `replace` and `replace_fn`"):
            eqx.tree_at(lambda tree: tree[0], [1, 2], **options)


def test_error_that_is_not_about_a_leaf_has_no_note():
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


def test_changes_by_where_do_not_change_the_tree_of_the_caller():
    tree, calls = [1, 2], []

    def where(tree):
        calls.append(tree)
        if len(calls) == 2:
            tree.append(3)
        return tree[0]

    assert tree_at(where, tree, 5) == [5, 2]
    assert tree == [1, 2]


# Functions of the tree `[0, array, None]` whose choice depends on the leaves.
DEPENDENT = [
    lambda tree: tree[0] if tree[0] else tree[1],
    lambda tree: tree[0] if tree[0] == 0 else tree[1],
    lambda tree: [leaf for leaf in tree if isinstance(leaf, int)],
    lambda tree: tree[0] if tree[2] is None else tree[1],
]


@both
def test_where_must_not_depend_on_the_values_of_leaves(eqx):
    for where in DEPENDENT:
        with pytest.raises(ValueError, match="`where` must not depend on the leaves"):
            eqx.tree_at(where, [0, ARRAY, None], replace_fn=lambda node: 5, is_leaf=is_none)


# --- short programs on both libraries -------------------------------------------------------------


def model(eqx, *values):
    class Model(eqx.Module):
        a: Any
        b: Any = None

        def get(self):
            return self.a

    return Model(*values)


def static(eqx, *values):
    class Static(eqx.Module):
        s: Any = eqx.field(static=True)
        w: Any = 1

    return Static(*values)


def is_tuple(node):
    return isinstance(node, tuple)


def double(node):
    return jtu.tree_map(lambda leaf: 2 * leaf, node)


def copied(tree):
    return jtu.tree_map(lambda leaf: leaf, tree)


# Programs with the same output, or with an error of the same type.
AGREE = {
    "two nodes as a list": lambda e: e.tree_at(lambda t: [t[0], t[1]], [1, 2, 3], [5, 6]),
    "all leaves": lambda e: e.tree_at(jtu.tree_leaves, [1, [2]], replace_fn=double),
    "values as an array": lambda e: e.tree_at(pair, [1, 2], np.arange(2)),
    "one leaf twice": lambda e: e.tree_at(lambda t: (t[0], t[0]), [1, 2], (5, 6)),
    "one Module at both places": lambda e: e.tree_at(pair, [model(e, 1)] * 2, (5, 6)),
    "no nodes": lambda e: e.tree_at(lambda t: (), [1, 2], ()),
    "no nodes and a value": lambda e: e.tree_at(lambda t: (), [1, 2], (1,)),
    "an empty tuple": lambda e: e.tree_at(lambda t: t[1], [1, ()], 5),
    "the None that is the tree": lambda e: e.tree_at(lambda t: t, None, 5),
    "the only None": lambda e: e.tree_at(lambda t: t.b, model(e, 1), 5),
    "a None and a leaf": lambda e: e.tree_at(pair, [None, 1], (5, 6)),
    "both of two None as leaves": lambda e: e.tree_at(pair, [None, None], (5, 6), is_leaf=is_none),
    "a None that is not in the tree": lambda e: e.tree_at(lambda t: None, [1], 5),
    "a number": lambda e: e.tree_at(lambda t: 3, [3], 5),
    "bound methods": lambda e: e.tree_at(lambda t: [t.get], model(e, 1), [5]),
    "a copy of the tree": lambda e: e.tree_at(copied, [1, [2]], replace_fn=double),
    "a static None": lambda e: e.tree_at(lambda t: t.s, static(e, None), 5),
    "below a bound method": lambda e: e.tree_at(lambda f: f.__self__.a, model(e, 1).get, 5)(),
    "one empty tuple of two": lambda e: e.tree_at(lambda t: t[1], [(), ()], 3),
    "in a leaf": lambda e: e.tree_at(lambda t: t[0][0], [(1, 2), 3], 5, is_leaf=is_tuple),
    "a leaf that is a function": lambda e: e.tree_at(lambda t: t[0], [len, 2], replace_fn=repr),
    "static choice": lambda e: e.tree_at(lambda t: t.w if t.s == 3 else t, static(e, 3), 5),
}


def end_of(program, library):
    """The text of the output of a program, or the type of its error.

    Ignores warnings: on Equinox, JAX warns if an iterator is a leaf.
    """
    found = output(lambda eqx: repr(program(eqx)), library)
    return found.raised or found.returned


def test_programs_agree_with_equinox():
    ours, theirs = (
        {name: end_of(program, library) for name, program in AGREE.items()}
        for library in (eqxlike, equinox)
    )
    assert ours == theirs


def put_five(tree):
    tree[0] = 5
    return tree[1]


LACKS_KEY = collections.defaultdict(list, a=2)
# Tuples (program, output on Equinox, output on eqxlike).
DIFFER = [
    (lambda e: e.tree_at(put_five, [1, 2], 7), TypeError, ValueError),
    (lambda e: dict(e.tree_at(lambda t: t["z"], LACKS_KEY, 5)), "{'a': 2, 'z': 5}", ValueError),
    (
        lambda e: e.tree_at(lambda t: t.s, static(e, None), 5, is_leaf=is_none),
        ValueError,
        TypeError,
    ),
    (lambda e: e.tree_at(lambda t: t.get, model(e, 1), 5), TypeError, ValueError),
    (lambda e: e.tree_at(pair, [1, 2], iter((5, 6))), TypeError, "[5, 6]"),
]


@pytest.mark.parametrize(("program", "theirs", "ours"), DIFFER)
def test_listed_programs_differ_from_equinox(program, theirs, ours):
    assert (end_of(program, equinox), end_of(program, eqxlike)) == (theirs, ours)
