import copy
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqxlike as eqx
from eqxlike import nn
from tests.nn.arrays import filled


@pytest.fixture
def model(getkey):
    return filled(nn.MLP, 2, 1, 4, 2, activation=jnp.tanh, key=getkey())


def all_but_last(model):
    return model.layers[:-1]


def loss(model, x):
    return jnp.sum(model(x) ** 2)


class Pair(eqx.Module):
    arrays: tuple
    label: str = eqx.field(static=True, default="pair")

    def total(self):
        return self.arrays[0] + self.arrays[1]["inner"]


class Final(eqx.Module, strict=True):
    weight: jax.Array


def test_no_gradient_of_a_frozen_array_is_computed(model):
    def num_products(model):
        def gradient(arrays, static, x):
            return eqx.filter_grad(loss)(eqx.combine(arrays, static), x)

        arrays, static = eqx.partition(model, eqx.is_array)
        jaxpr = jax.make_jaxpr(gradient, static_argnums=1)(arrays, static, jnp.ones(2))
        return str(jaxpr).count("dot_general")

    # Forward three; backward one for each weight, and one for each hidden input.
    assert num_products(model) == 3 + 3 + 2
    assert num_products(nn.freeze(model, all_but_last)) == 3 + 1


@pytest.mark.parametrize("way", ["vjp", "hessian"])
def test_all_ways_to_differentiate_leave_it_out(way, model):
    frozen = nn.freeze(model, all_but_last)

    def of(model):
        return loss(model, jnp.ones(2))

    if way == "vjp":
        (gradient,) = eqx.filter_jit(lambda model: eqx.filter_vjp(of, model)[1](1.0))(frozen)
    else:
        gradient = eqx.filter_jit(eqx.filter_hessian(of))(frozen).layers[-1].weight
        assert gradient.layers[-1].weight.shape == (1, 4, 1, 4)
    assert gradient.layers[0].weight is None
    assert gradient.layers[-1].weight is not None


def test_frozen_array_goes_into_jit_as_an_array(model):
    traces = []

    @eqx.filter_jit
    def call(model, x):
        traces.append(None)
        return model(x)

    frozen = nn.freeze(model)
    for factor in (1, 2):
        scaled = jax.tree.map(
            lambda leaf, f=factor: leaf * f if eqx.is_array(leaf) else leaf, frozen
        )
        np.testing.assert_allclose(call(scaled, jnp.ones(2)), scaled(jnp.ones(2)), rtol=1e-5)
    assert len(traces) == 1
    arrays, _ = eqx.partition(frozen, eqx.is_array)
    assert len(jax.tree.leaves(arrays)) == 6


def test_what_comes_out_of_jit_is_frozen_as_before(model):
    frozen = nn.freeze(model, all_but_last)
    returned = eqx.filter_jit(lambda model: model)(frozen)
    assert eqx.tree_equal(returned, frozen)
    assert eqx.filter_grad(loss)(returned, jnp.ones(2)).layers[0].weight is None


def test_methods_find_plain_arrays(model):
    frozen = nn.freeze(model)
    assert isinstance(frozen.layers[0], nn.Linear)
    assert isinstance(frozen.layers[0].weight, jax.Array)
    assert type(frozen).__name__ == "MLP"
    assert repr(frozen) == repr(model)
    np.testing.assert_array_equal(frozen(jnp.ones(2)), model(jnp.ones(2)))


def test_paths_are_those_of_the_model(model):
    frozen = nn.freeze(model, all_but_last)
    paths, expected = (
        [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(tree)]
        for tree in (frozen, model)
    )
    assert paths == expected


def test_unfreezing_undoes_it_for_all_or_for_some(model):
    frozen = nn.freeze(model)
    assert eqx.tree_equal(nn.unfreeze(frozen), model)
    assert type(nn.unfreeze(frozen)) is nn.MLP
    some = nn.unfreeze(frozen, lambda model: model.layers[0].weight)
    gradient = eqx.filter_grad(loss)(some, jnp.ones(2))
    assert [leaf.shape for leaf in jax.tree.leaves(gradient)] == [(4, 2)]


def test_freezing_twice_adds_up(model):
    once = nn.freeze(model, lambda model: model.layers[0].weight)
    twice = nn.freeze(once, lambda model: [model.layers[0].bias, model.layers[1]])
    assert eqx.tree_equal(twice, nn.freeze(model, all_but_last))


def test_frozen_and_unfrozen_differ_in_structure(model):
    assert not eqx.tree_equal(nn.freeze(model, all_but_last), model)
    assert jax.tree.structure(nn.freeze(model)) == jax.tree.structure(nn.freeze(model))


def test_array_inside_containers_of_a_field_is_frozen_by_itself():
    pair = Pair((jnp.array(1.0), {"inner": jnp.array(2.0), "none": None}))
    frozen = nn.freeze(pair, lambda pair: pair.arrays[1]["inner"])
    gradient = eqx.filter_grad(lambda pair: pair.total())(frozen)
    assert gradient.arrays[0] == 1
    assert gradient.arrays[1] == {"inner": None, "none": None}


@pytest.mark.parametrize(
    "clone", [copy.copy, copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))]
)
def test_copy_is_frozen_too(clone):
    frozen = nn.freeze(
        Pair((jnp.array(1.0), {"inner": jnp.array(2.0)})), lambda pair: pair.arrays[0]
    )
    cloned = clone(frozen)
    assert eqx.tree_equal(cloned, frozen)
    assert type(cloned) is type(frozen)


def test_final_class_may_be_frozen():
    frozen = nn.freeze(Final(jnp.array(2.0)))
    assert eqx.filter_grad(lambda module: module.weight**2)(frozen).weight is None


def test_no_array_and_one_of_no_module_are_refused(model):
    with pytest.raises(ValueError, match="nodes that `where` selects have no arrays"):
        nn.freeze(model, lambda model: model.activation)
    with pytest.raises(ValueError, match=r"model\['a'\] is not in a Module"):
        nn.freeze({"a": jnp.ones(2)})
    for where in ("layers[0]", nn.Linear, model.layers[0], model):
        with pytest.raises(TypeError, match="`where` must be a function from the model to the nod"):
            nn.freeze(model, where)
