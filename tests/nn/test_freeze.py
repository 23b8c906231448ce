"""`freeze` removes arrays from every gradient, and changes nothing else in a model."""

import copy
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqxlike as eqx
from eqxlike import nn
from tests.nn.arrays import filled, paths

X = jnp.ones(2)


@pytest.fixture
def model(getkey):
    return filled(nn.MLP, 2, 1, 4, 2, activation=jnp.tanh, key=getkey())


def all_but_last(model):
    return model.layers[:-1]


def loss(model):
    return jnp.sum(model(X) ** 2)


class Pair(eqx.Module):
    arrays: tuple
    label: str = eqx.field(static=True, default="pair")

    def total(self):
        return self.arrays[0] + self.arrays[1]["inner"]


class Final(eqx.Module, strict=True):
    weight: jax.Array


def pair():
    return Pair((jnp.array(1.0), {"inner": jnp.array(2.0), "none": None}))


def test_no_gradient_of_a_frozen_array_is_computed(model):
    def num_products(model):
        return str(eqx.filter_make_jaxpr(eqx.filter_grad(loss))(model)[0]).count("dot_general")

    # Three forward, and backward one for each trained weight and for each hidden input.
    assert num_products(model) == 3 + 3 + 2
    assert num_products(nn.freeze(model, all_but_last)) == 3 + 1


def test_vjp_and_hessian_exclude_frozen_arrays(model):
    frozen = nn.freeze(model, all_but_last)
    (gradient,) = eqx.filter_jit(lambda model: eqx.filter_vjp(loss, model)[1](1.0))(frozen)
    assert gradient.layers[0].weight is None
    assert gradient.layers[-1].weight is not None
    hessian = eqx.filter_jit(eqx.filter_hessian(loss))(frozen).layers[-1].weight
    assert hessian.layers[-1].weight.shape == (1, 4, 1, 4)
    assert hessian.layers[0].weight is None


def test_frozen_arrays_are_arrays_in_jit_and_stay_frozen(model):
    traces = []

    @eqx.filter_jit
    def call(model):
        traces.append(None)
        return model, model(X)

    frozen = nn.freeze(model, all_but_last)
    for factor in (1, 2):
        times = lambda leaf, factor=factor: leaf * factor if eqx.is_array(leaf) else leaf
        scaled = jax.tree.map(times, frozen)
        returned, out = call(scaled)
        np.testing.assert_allclose(out, scaled(X), rtol=1e-5)
        assert eqx.tree_equal(returned, scaled)
        assert eqx.filter_grad(loss)(returned).layers[0].weight is None
    assert len(traces) == 1
    assert len(jax.tree.leaves(eqx.filter(frozen, eqx.is_array))) == 6


def test_frozen_model_has_the_methods_arrays_paths_and_text_of_the_model(model):
    frozen = nn.freeze(model)
    assert isinstance(frozen.layers[0], nn.Linear)
    assert isinstance(frozen.layers[0].weight, jax.Array)
    assert type(frozen).__name__ == "MLP"
    assert repr(frozen) == repr(model)
    np.testing.assert_array_equal(frozen(X), model(X))
    assert paths(nn.freeze(model, all_but_last)) == paths(model)


def test_unfreeze_reverts_freeze_for_all_or_some_arrays(model):
    frozen = nn.freeze(model)
    assert eqx.tree_equal(nn.unfreeze(frozen), model)
    assert type(nn.unfreeze(frozen)) is nn.MLP
    some = nn.unfreeze(frozen, lambda model: model.layers[0].weight)
    gradient = eqx.filter_grad(loss)(some)
    assert [leaf.shape for leaf in jax.tree.leaves(gradient)] == [(4, 2)]


def test_freezing_twice_adds_up_and_changes_the_structure(model):
    once = nn.freeze(model, lambda model: model.layers[0].weight)
    twice = nn.freeze(once, lambda model: [model.layers[0].bias, model.layers[1]])
    assert eqx.tree_equal(twice, nn.freeze(model, all_but_last))
    assert not eqx.tree_equal(twice, model)


def test_single_arrays_in_containers_and_in_final_classes_are_frozen():
    frozen = nn.freeze(pair(), lambda pair: pair.arrays[1]["inner"])
    gradient = eqx.filter_grad(lambda pair: pair.total())(frozen)
    assert gradient.arrays == (1, {"inner": None, "none": None})
    final = nn.freeze(Final(jnp.array(2.0)))
    assert eqx.filter_grad(lambda module: module.weight**2)(final).weight is None


def test_copies_are_frozen_too():
    frozen = nn.freeze(pair(), lambda pair: pair.arrays[0])
    for clone in (copy.copy, copy.deepcopy, lambda each: pickle.loads(pickle.dumps(each))):
        assert eqx.tree_equal(clone(frozen), frozen)
        assert type(clone(frozen)) is type(frozen)


def test_nodes_without_arrays_and_outside_of_modules_are_refused(model):
    with pytest.raises(ValueError, match="nodes that `where` selects have no arrays"):
        nn.freeze(model, lambda model: model.activation)
    with pytest.raises(ValueError, match=r"model\['a'\] is not in a Module"):
        nn.freeze({"a": jnp.ones(2)})
    for where in ("layers[0]", nn.Linear, model.layers[0], model):
        with pytest.raises(TypeError, match="`where` must be a function from the model to the nod"):
            nn.freeze(model, where)
