"""`tree_flatten_one_level`, and `tree_check`, which refuses shared nodes and cycles.

A test with the parameter `eqx` runs on Equinox and on eqxlike, which must agree.
"""

import re
from typing import Any

import equinox
import jax.numpy as jnp
import jax.tree_util as jtu
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

import eqxlike
from eqxlike import tree_check, tree_flatten_one_level
from tests.beside_equinox import both
from tests.pytree.trees import follow, trees_of

TREES = trees_of(st.sampled_from([1, "a", None, jnp.sin]), max_leaves=8)


def nodes_of(tree):
    """The root and all nodes that contain a leaf, with their paths."""
    leaf_paths = [path for path, _ in jtu.tree_leaves_with_path(tree)]
    paths = {path[:length] for path in leaf_paths for length in range(len(path) + 1)} | {()}
    return [(path, follow(tree, path)) for path in sorted(paths, key=jtu.keystr)]


# --- one level ------------------------------------------------------------------------------------


@given(TREES)
def test_children_rebuild_the_node_as_on_equinox(tree):
    children, treedef = tree_flatten_one_level(tree)
    assert eqxlike.tree_equal(treedef.unflatten(children), tree, typematch=True)
    equinox_children, equinox_treedef = equinox.tree_flatten_one_level(tree)
    assert [*map(id, children)] == [*map(id, equinox_children)]
    assert treedef == equinox_treedef


@both
def test_node_may_be_its_own_grandchild_but_not_its_own_child(eqx):
    outer = {}
    outer["inner"] = {"outer": outer}
    children, _ = eqx.tree_flatten_one_level(outer)
    assert children[0] is outer["inner"]
    outer["inner"] = outer
    with pytest.raises(ValueError, match="dict") as caught:
        eqx.tree_flatten_one_level(outer)
    expected = "the dict at pytree is at pytree['inner'] too"
    assert eqx is equinox or expected in str(caught.value)
    with pytest.raises(ValueError, match="sorting pytree dictionary keys"):
        eqx.tree_flatten_one_level({1: 2, "a": 3})


# --- the check ------------------------------------------------------------------------------------


@given(TREES, st.data())
def test_shared_node_is_found_with_both_paths(tree, data):
    tree = jtu.tree_map(lambda leaf: leaf, tree)
    assert tree_check(tree) is None
    path, node = data.draw(st.sampled_from(nodes_of(tree)))
    assume(jtu.tree_leaves(node) and not jtu.all_leaves([node]))
    places = rf"pytree\[0\]{re.escape(jtu.keystr(path))} is at pytree\[1\] too"
    with pytest.raises(ValueError, match=f"The {type(node).__name__} at {places}"):
        tree_check([tree, node])


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


def hold_itself(depth):
    outer = innermost = [1]
    for _ in range(depth):
        outer = [outer]
    innermost.append(outer)
    return outer


PASS = [
    lambda model, static: twice(jnp.ones(2)),
    lambda model, static: twice(None),
    lambda model, static: twice(static(1)),
    lambda model, static: [[1], [1]],
    lambda model, static: model(1).method,
]
REFUSE = [
    lambda model: twice([1]),
    lambda model: twice(model(1)),
    lambda model: twice([None]),
    # Two bound methods of the same Module.
    lambda model: (lambda it: [it.method, it.method])(model(1)),
    lambda model: hold_itself(0),
    lambda model: hold_itself(2),
]


@both
def test_check_accepts_trees_and_refuses_shared_nodes_and_cycles(eqx):
    model, static = make(eqx)
    for case in PASS:
        assert eqx.tree_check(case(model, static)) is None
    for case in REFUSE:
        with pytest.raises(ValueError, match=r"PyTree|pytree"):
            eqx.tree_check(case(model))


@jtu.register_pytree_node_class
class Fresh:
    """A node that creates its children each time it is flattened."""

    def __init__(self, values):
        self.values = values

    def tree_flatten(self):
        return ([[value] for value in self.values], None)

    @classmethod
    def tree_unflatten(cls, aux, children):
        return cls([child[0] for child in children])


def test_check_names_both_places_of_a_cycle_and_accepts_fresh_children():
    expected = r"the list at pytree\['a'\] is at pytree\['a'\]\[0\]\[0\]\[1\] too"
    with pytest.raises(ValueError, match=expected):
        tree_check({"a": hold_itself(2)})
    tree_check([Fresh(range(3)) for _ in range(20)])
