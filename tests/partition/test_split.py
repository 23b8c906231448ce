"""Static values that share a trace, and trees split into arrays and the rest."""

import functools
import weakref

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
from hypothesis import given
from hypothesis import strategies as st

import eqxlike as eqx
from eqxlike import nn
from eqxlike._partition import find_static_difference, is_same_static, split, split_leaves
from tests.pytree.trees import trees_of


def test_unhashable_values_are_compared_by_identity():
    assert is_same_static(functools.partial(max, 1), functools.partial(max, 1))
    unhashable = [1]
    assert is_same_static(unhashable, unhashable)
    assert not is_same_static(unhashable, [1])


def model(activation=jax.nn.relu, size=3, scale=1.0):
    keys = jax.random.split(jax.random.key(size), 2)
    layers = [nn.Linear(size, size, key=keys[0]), {"activation": activation, "scale": scale}]
    return nn.Sequential(layers)


def test_static_difference_is_found_with_its_path_and_arrays_are_ignored():
    other = jax.tree.map(lambda leaf: leaf + 1 if eqx.is_array(leaf) else leaf, model())
    assert find_static_difference(model(), other) is None
    assert find_static_difference(model(), nn.freeze(model())) is not None
    for other, path, first, second in [
        (model(jax.nn.tanh), ".layers[1]['activation']", jax.nn.relu, jax.nn.tanh),
        (model(scale=1), ".layers[1]['scale']", 1.0, 1),
        (nn.Sequential([]), ".layers", model().layers, ()),
        ("leaf", "", model(), "leaf"),
    ]:
        found = find_static_difference(model(), other)
        assert jax.tree_util.keystr(found.path) == path
        assert eqx.tree_equal((found.first, found.second), (first, second), typematch=True)
    found = find_static_difference(model(), model(size=4))
    assert jax.tree_util.keystr(found.path) == ".layers[0]"
    assert (found.first.in_features, found.second.in_features) == (3, 4)


# --- split ----------------------------------------------------------------------------------------

trees = trees_of(st.sampled_from([0, 1, -5, "", "a", None]), max_leaves=8)


def is_int(leaf):
    return isinstance(leaf, int)


@given(trees)
def test_merge_is_the_inverse_of_split(tree):
    leaves, treedef = jtu.tree_flatten(tree)
    dynamic, rest = split(tree, is_int)
    assert dynamic == rest.take(leaves) == [leaf for leaf in leaves if is_int(leaf)]
    assert rest.merge(dynamic) == tree
    by_mask, rest_by_mask = split_leaves(leaves, treedef, list(map(is_int, leaves)))
    assert (by_mask, rest_by_mask.merge(by_mask)) == (dynamic, tree)


@given(trees)
def test_merge_inserts_other_leaves_at_the_positions_of_the_split_leaves(tree):
    dynamic, rest = split(tree, is_int)
    others = [f"other {number}" for number in range(len(dynamic))]
    assert rest.leaves(others) == jtu.tree_leaves(rest.merge(others))
    expected = jtu.tree_map(lambda leaf: leaf if is_int(leaf) else "other", tree)
    assert rest.merge_into("other", dynamic) == expected


def test_arrays_are_split_off_by_default():
    dynamic, rest = split({"a": jnp.arange(2), "b": 3})
    assert (len(dynamic), rest.merge(["array"])) == (1, {"a": "array", "b": 3})
    assert repr(rest) == "Rest(PyTreeDef({'a': *, 'b': *}))"


def test_rest_keeps_no_split_leaf_alive():
    class Leaf:
        pass

    leaf = Leaf()
    reference = weakref.ref(leaf)
    dynamic, rest = split([leaf, 1], lambda leaf: not is_int(leaf))
    del leaf, dynamic
    assert (reference(), rest.merge(["new"])) == (None, ["new", 1])
