import re
from typing import Any

import equinox
import jax.numpy as jnp
import jax.tree_util as jtu
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

import eqxlike
from eqxlike import tree_check
from tests.beside_equinox import both
from tests.pytree.trees import Pair, follow, trees_of

TREES = trees_of(st.sampled_from([1, "a", None, jnp.sin]), max_leaves=8)


def nodes_of(tree):
    """The root, and every node with a leaf in it, each with its path."""
    leaf_paths = [path for path, _ in jtu.tree_leaves_with_path(tree)]
    paths = {path[:length] for path in leaf_paths for length in range(len(path) + 1)} | {()}
    return [(path, follow(tree, path)) for path in sorted(paths, key=jtu.keystr)]


def is_refused(library, tree):
    try:
        library.tree_check(tree)
    except ValueError:
        return True
    return False


# --- laws -----------------------------------------------------------------------------------------


@given(TREES)
def test_a_rebuilt_tree_passes(tree):
    tree_check(jtu.tree_map(lambda leaf: leaf, tree))


@given(TREES, st.data())
def test_a_node_that_is_put_in_a_second_place_is_found_with_both_paths(tree, data):
    tree = jtu.tree_map(lambda leaf: leaf, tree)
    path, node = data.draw(st.sampled_from(nodes_of(tree)))
    assume(jtu.tree_leaves(node) and not jtu.all_leaves([node]))
    places = rf"pytree\[0\]{re.escape(jtu.keystr(path))} stands at pytree\[1\] too"
    with pytest.raises(ValueError, match=f"The {type(node).__name__} at {places}"):
        tree_check([tree, node])


@given(TREES, st.data())
def test_agrees_with_equinox_on_what_is_put_in_a_second_place(tree, data):
    tree = jtu.tree_map(lambda leaf: leaf, tree)
    _, node = data.draw(st.sampled_from(nodes_of(tree)))
    wrapped = data.draw(st.sampled_from([(tree, node), {"b": [node], "a": tree}, Pair(node, tree)]))
    assert is_refused(eqxlike, wrapped) is is_refused(equinox, wrapped)


# --- cases ----------------------------------------------------------------------------------------


def make(eqx):
    class Model(eqx.Module):
        x: Any

        def method(self):
            return self.x

    class Static(eqx.Module):
        x: Any = eqx.field(static=True)

    return Model, Static


def twice(node):
    return [node, node]


PASS = {
    "one array twice": lambda eqx: twice(jnp.ones(2)),
    "one number twice": lambda eqx: twice(1),
    "None twice": lambda eqx: twice(None),
    "one empty list twice": lambda eqx: twice([]),
    "one empty dict twice": lambda eqx: twice({}),
    "the empty tuple twice": lambda eqx: twice(()),
    "one Module without children twice": lambda eqx: twice(make(eqx)[1](1)),
    "one class twice": lambda eqx: twice(make(eqx)[0]),
    "two equal lists": lambda eqx: [[1], [1]],
    "two equal Modules": lambda eqx: [make(eqx)[0](1), make(eqx)[0](1)],
    "a bound method": lambda eqx: make(eqx)[0](1).method,
    "a leaf": lambda eqx: 1,
}
REFUSE = {
    "one list twice": lambda eqx: twice([1]),
    "one dict twice": lambda eqx: twice({"a": 1}),
    "one tuple twice": lambda eqx: twice((1,)),
    "one Module twice": lambda eqx: twice(make(eqx)[0](1)),
    "one Partial twice": lambda eqx: twice(jtu.Partial(max, 1)),
    "one list of None twice": lambda eqx: twice([None]),
    "one Module of None twice": lambda eqx: twice(make(eqx)[0](None)),
    "one list at two depths": lambda eqx: (lambda node: [node, {"a": (node,)}])([1]),
    "two bound methods of one Module": lambda eqx: (lambda model: [model.method, model.method])(
        make(eqx)[0](1)
    ),
}


@both
@pytest.mark.parametrize("case", PASS)
def test_passes(eqx, case):
    assert eqx.tree_check(PASS[case](eqx)) is None


@both
@pytest.mark.parametrize("case", REFUSE)
def test_refuses(eqx, case):
    with pytest.raises(ValueError, match=r"PyTree|pytree"):
        eqx.tree_check(REFUSE[case](eqx))


def hold_itself(depth):
    outer = innermost = [1]
    for _ in range(depth):
        outer = [outer]
    innermost.append(outer)
    return outer


@both
@pytest.mark.parametrize("depth", [0, 1, 2])
def test_refuses_what_holds_itself(eqx, depth):
    with pytest.raises(ValueError, match="list"):
        eqx.tree_check(hold_itself(depth))


def test_the_error_of_what_holds_itself_names_both_places():
    expected = r"the list at pytree\['a'\] is at pytree\['a'\]\[0\]\[0\]\[1\] too"
    with pytest.raises(ValueError, match=expected):
        tree_check({"a": hold_itself(2)})


def test_nodes_that_each_flattening_makes_anew_are_not_taken_for_one():
    @jtu.register_pytree_node_class
    class Fresh:
        def __init__(self, values):
            self.values = values

        def tree_flatten(self):
            return ([[value] for value in self.values], None)

        @classmethod
        def tree_unflatten(cls, aux, children):
            return cls([child[0] for child in children])

    tree_check([Fresh(range(3)) for _ in range(20)])
