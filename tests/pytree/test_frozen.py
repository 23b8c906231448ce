"""Filters, gradients and updates exclude frozen arrays."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqxlike as eqx
from eqxlike import nn


class Trained(eqx.Module):
    """A predicate that is a callable object."""

    def __call__(self, leaf):
        return eqx.is_inexact_array(leaf)


CHOOSE_TRAINED = [
    *(eqx.is_inexact_array, eqx.is_inexact_array_like, Trained().__call__),
    lambda leaf: eqx.is_inexact_array(leaf),
    lambda leaf: eqx.is_array(leaf) and leaf.dtype == jnp.float32,
]
CHOOSE_ALL = [
    *(eqx.is_array, lambda leaf: eqx.is_array(leaf)),
    *(lambda leaf: hasattr(leaf, "shape"), lambda leaf: True),
]


@pytest.fixture(scope="module")
def model():
    """A model whose first layer is frozen and whose second layer is not."""
    model = nn.MLP(2, "scalar", 4, 1, activation=jnp.tanh, key=jax.random.key(0))
    return nn.freeze(model, lambda model: model.layers[0])


def is_kept(tree):
    return [layer.weight is not None for layer in tree.layers]


@pytest.mark.parametrize("is_traced", [False, True], ids=["plain", "traced"])
def test_filter_for_trained_arrays_excludes_frozen_arrays(is_traced, model):
    def check(model):
        for spec in CHOOSE_TRAINED:
            assert is_kept(eqx.filter(model, spec)) == [False, True]
            assert is_kept(eqx.filter(model, spec, inverse=True)) == [True, False]
            chosen, rest = eqx.partition(model, spec)
            assert is_kept(chosen) == [False, True]
            leaves = jax.tree.leaves(eqx.combine(chosen, rest))
            assert [*map(id, leaves)] == [*map(id, jax.tree.leaves(model))]
            specs = jax.tree.map(lambda _, spec=spec: spec, model)
            assert is_kept(eqx.filter(model, specs)) == [False, True]
            assert is_kept(eqx.filter((1, model), (False, spec))[1]) == [False, True]

    (eqx.filter_jit(check) if is_traced else check)(model)


@pytest.mark.parametrize("is_traced", [False, True], ids=["plain", "traced"])
def test_filter_for_all_arrays_includes_frozen_arrays(is_traced, model):
    def check(model):
        for spec in CHOOSE_ALL:
            assert is_kept(eqx.filter(model, spec)) == [True, True]

    (eqx.filter_jit(check) if is_traced else check)(model)


def test_predicate_sees_frozen_numpy_arrays_as_numpy_arrays(model):
    model = jax.tree.map(lambda leaf: np.asarray(leaf) if eqx.is_array(leaf) else leaf, model)
    assert is_kept(eqx.filter(model, lambda leaf: isinstance(leaf, np.ndarray))) == [True, True]
    assert is_kept(eqx.filter(model, lambda leaf: eqx.is_inexact_array(leaf))) == [False, True]
    scalar = eqx.tree_at(lambda model: model.layers[0].weight, model, np.float32(1))
    assert is_kept(eqx.filter(scalar, lambda leaf: isinstance(leaf, np.generic))) == [True, False]
    assert is_kept(eqx.filter(scalar, lambda leaf: eqx.is_inexact_array(leaf))) == [False, True]


def test_boolean_specification_also_selects_frozen_arrays(model):
    mask = jax.tree.map(eqx.is_inexact_array, model)
    assert is_kept(eqx.filter(model, mask)) == [True, True]
    assert eqx.tree_equal(eqx.filter(model, True), model)


def test_predicate_may_select_frozen_integers():
    class Table(eqx.Module):
        index: jax.Array
        weight: jax.Array

    table = nn.freeze(Table(jnp.arange(2, dtype="int8"), jnp.ones(2)))
    kept = eqx.filter(table, lambda leaf: jnp.issubdtype(leaf.dtype, jnp.integer))
    assert (kept.index is not None, kept.weight) == (True, None)


def test_is_leaf_is_not_called_with_the_marker_of_a_frozen_array(model):
    def is_leaf(node):
        return not isinstance(node, eqx.Module | tuple)

    assert is_kept(eqx.filter(model, eqx.is_array, is_leaf=is_leaf)) == [True, True]
    assert is_kept(eqx.filter(model, eqx.is_inexact_array, is_leaf=is_leaf)) == [False, True]


def test_predicate_that_reads_values_is_an_error_that_names_the_fix(model):
    with pytest.raises(jax.errors.TracerBoolConversionError) as caught:
        eqx.filter(model, lambda leaf: eqx.is_array(leaf) and bool(jnp.isfinite(leaf).all()))
    assert "an array of integers instead of a frozen array" in caught.value.__notes__[-1]


def test_predicate_is_called_once_for_each_leaf_of_a_model_without_frozen_arrays(model):
    asked, other = [], nn.Linear(2, 2, key=jax.random.key(0))
    eqx.filter(other, asked.append)
    assert [id(leaf) for leaf in asked] == [id(leaf) for leaf in jax.tree.leaves(other)]


@eqx.filter_jit
def step(model, spec):
    """The gradient with respect to the leaves that `spec` selects, and the updated model."""
    trained, rest = eqx.partition(model, spec)
    gradient = jax.grad(lambda part: eqx.combine(part, rest)(jnp.ones(2)) ** 2)(trained)
    return gradient, eqx.combine(eqx.apply_updates(trained, gradient), rest)


def assert_only_the_second_layer_changed(before, after):
    assert eqx.tree_equal(after.layers[0], before.layers[0])
    assert not eqx.tree_equal(after.layers[1], before.layers[1])


@pytest.mark.parametrize("has_mask", [False, True], ids=["is_array", "mask"])
def test_updates_do_not_change_a_frozen_array_with_a_gradient(has_mask, model):
    mask = jax.tree.map(eqx.is_inexact_array, model)
    gradient, after = step(model, mask if has_mask else eqx.is_array)
    assert is_kept(gradient) == [True, True]
    assert_only_the_second_layer_changed(model, after)


def test_updates_may_leave_out_a_subtree_with_a_frozen_array(model):
    updates = eqx.filter(model, eqx.is_inexact_array)
    updates = eqx.tree_at(lambda model: model.layers, updates, (None, updates.layers[1]))
    assert eqx.tree_equal(eqx.apply_updates(model, updates).layers[0], model.layers[0])
