import hashlib

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest

import eqxlike as eqx
from eqxlike import nn

initializers = jax.nn.initializers


def weights(path, array):
    return initializers.normal(1.0) if path.endswith(".weight") else None


@pytest.fixture
def model(getkey):
    return nn.MLP(2, 3, 4, 1, key=getkey())


def test_rule_chooses_by_path_and_the_rest_stays(model, getkey):
    new = nn.reinitialise(model, weights, key=getkey())
    assert len(new.layers) == 2
    for layer, old in zip(new.layers, model.layers, strict=True):
        assert layer.weight.shape == old.weight.shape
        assert np.not_equal(layer.weight, old.weight).all()
        assert layer.bias is old.bias


def test_rule_gets_every_floating_array_with_its_path(getkey):
    tree = {"layer": nn.Linear(2, 3, key=getkey()), "count": jnp.arange(3), "key": getkey()}
    asked = {}
    nn.reinitialise(tree, lambda path, array: asked.update({path: array.shape}), key=getkey())
    assert asked == {"['layer'].weight": (3, 2), "['layer'].bias": (3,)}


def test_another_layer_changes_no_value_of_the_others(getkey):
    layers, key = [nn.Linear(2, 2, key=getkey()) for _ in range(3)], getkey()
    few = nn.reinitialise(layers[:2], weights, key=key)
    many = nn.reinitialise([*layers[:2], layers[2]], weights, key=key)
    assert eqx.tree_equal(few, many[:2])
    assert np.not_equal(many[0].weight, many[1].weight).all()


def test_value_hangs_on_the_path_and_not_on_the_process():
    model = {"a": jnp.zeros(2)}
    new = nn.reinitialise(model, lambda *_: initializers.normal(1.0), key=jr.key(0))
    # blake2b("['a']") in eight bytes is the two words that are folded into the key.
    words = np.frombuffer(hashlib.blake2b(b"['a']", digest_size=8).digest(), "<u4")
    key = jr.fold_in(jr.fold_in(jr.key(0), words[0]), words[1])
    np.testing.assert_array_equal(new["a"], jr.normal(jr.split(key, 1)[0], (2,)))


@pytest.mark.parametrize("shape", [(5, 7), (5, 7, 3, 2)])
def test_initializer_counts_fan_in_on_inputs(shape, getkey):
    seen = []

    def initializer(key, shape, dtype):
        seen.append(shape)
        return jnp.zeros(shape, dtype)

    new = nn.reinitialise([jnp.ones(shape)], lambda *_: initializer, key=getkey())
    assert seen == [(*shape[2:], 7, 5)]
    assert new[0].shape == shape


def test_dtype_is_kept(getkey):
    model = nn.Linear(2, 3, dtype=jnp.bfloat16, key=getkey())
    assert nn.reinitialise(model, weights, key=getkey()).weight.dtype == jnp.bfloat16


def test_members_of_an_ensemble_get_values_of_their_own(getkey):
    keys = jr.split(getkey(), 3)
    models = eqx.filter_vmap(lambda key: nn.Linear(2, 4, key=key))(keys)

    @eqx.filter_jit
    def new_and_expected(models, keys):
        renew = eqx.filter_vmap(lambda model, key: nn.reinitialise(model, weights, key=key))
        one = jax.tree.map(lambda leaf: leaf[1] if eqx.is_array(leaf) else leaf, models)
        return renew(models, keys), nn.reinitialise(one, weights, key=jr.clone(keys)[1])

    new, expected = new_and_expected(models, jr.clone(keys))
    np.testing.assert_allclose(new.weight[1], expected.weight, rtol=1e-6)
    assert len(set(np.ravel(new.weight).tolist())) == 3 * 4 * 2


def test_frozen_array_stays_frozen(model, getkey):
    new = nn.reinitialise(nn.freeze(model), weights, key=getkey())
    assert eqx.filter(new, eqx.is_inexact_array).layers[0].weight is None


def test_rule_that_returns_no_function_is_refused_with_the_path(model, getkey):
    with pytest.raises(TypeError, match=r"array at model\.layers\[0\]\.weight it returned 0\.0"):
        nn.reinitialise(model, lambda *_: 0.0, key=getkey())


def test_wrong_shape_from_an_initializer_names_the_path(model, getkey):
    def wrong(key, shape, dtype):
        return jnp.zeros(3, dtype)

    with pytest.raises(ValueError, match="returned shape") as caught:
        nn.reinitialise(model, lambda *_: wrong, key=getkey())
    assert caught.value.__notes__ == ["The array is that at model.layers[0].weight."]
