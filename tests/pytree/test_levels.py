import equinox
import jax.numpy as jnp
import jax.tree_util as jtu
import pytest
from hypothesis import given
from hypothesis import strategies as st

import eqxlike
from eqxlike import tree_flatten_one_level
from tests.beside_equinox import both
from tests.pytree.trees import trees_of

TREES = trees_of(st.integers() | st.text(max_size=2) | st.none(), max_leaves=10, max_size=2)


@given(TREES)
def test_children_make_the_node_again(tree):
    children, treedef = tree_flatten_one_level(tree)
    assert eqxlike.tree_equal(treedef.unflatten(children), tree, typematch=True)


@given(TREES)
def test_agrees_with_equinox(tree):
    children, treedef = tree_flatten_one_level(tree)
    equinox_children, equinox_treedef = equinox.tree_flatten_one_level(tree)
    assert [*map(id, children)] == [*map(id, equinox_children)]
    assert treedef == equinox_treedef


@given(TREES)
def test_repeated_it_reaches_every_leaf(tree):
    def leaves(tree):
        children, treedef = tree_flatten_one_level(tree)
        if jtu.treedef_is_leaf(treedef):
            return children
        return [leaf for child in children for leaf in leaves(child)]

    assert [*map(id, leaves(tree))] == [*map(id, jtu.tree_leaves(tree))]


@both
def test_children_of_a_module_are_its_dynamic_fields(eqx):
    class Model(eqx.Module):
        layers: list
        scale: float
        name: str = eqx.field(static=True, default="model")

    assert eqx.tree_flatten_one_level(Model([1, 2], 3.0))[0] == [[1, 2], 3.0]


@both
@pytest.mark.parametrize(
    "leaf", [4, "text", jnp.sin, object()], ids=["int", "str", "sin", "object"]
)
def test_a_leaf_is_its_own_only_child(eqx, leaf):
    children, treedef = eqx.tree_flatten_one_level(leaf)
    assert (children, treedef) == ([leaf], jtu.tree_structure(leaf))


@both
@pytest.mark.parametrize("node", [None, (), [], {}], ids=repr)
def test_what_is_empty_has_no_children(eqx, node):
    assert eqx.tree_flatten_one_level(node) == ([], jtu.tree_structure(node))


@both
def test_a_node_that_is_its_own_grandchild_has_children(eqx):
    outer = {}
    outer["inner"] = {"outer": outer}
    children, _ = eqx.tree_flatten_one_level(outer)
    assert children[0] is outer["inner"]


@both
def test_a_node_that_is_its_own_child_is_an_error(eqx):
    node = [1]
    node.append(node)
    with pytest.raises(ValueError, match="list"):
        eqx.tree_flatten_one_level(node)


def test_the_error_of_a_node_that_is_its_own_child_says_which_child():
    node = {"a": 1}
    node["b"] = node
    with pytest.raises(ValueError, match=r"the dict at pytree is at pytree\['b'\] too"):
        tree_flatten_one_level(node)


@both
def test_keys_that_cannot_be_sorted_are_an_error(eqx):
    with pytest.raises(ValueError, match="sorting pytree dictionary keys"):
        eqx.tree_flatten_one_level({1: 2, "a": 3})
