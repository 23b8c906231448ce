"""`to_bayesian` replaces layers. The mean output of the model does not change."""

import operator

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest

import eqxlike as eqx
from eqxlike import nn
from tests.nn.arrays import assert_close, filled, normal


class Doubled(nn.Linear):
    def __call__(self, x, *, key=None):
        return 2 * super().__call__(x)


call = eqx.filter_jit(lambda layer, x, key=None: layer(x, key=key))


@pytest.fixture
def model(getkey):
    """A model for images of shape (2, 4, 4)."""
    return nn.Sequential(
        [
            nn.Conv2d(2, 3, 3, use_bias=False, key=getkey()),
            nn.Lambda(jnp.ravel),
            nn.Linear(12, 2, key=getkey()),
        ]
    )


def test_inference_mode_computes_the_outputs_of_the_original(getkey):
    # There are two stacked layers between the first and the last layer.
    model, x = filled(nn.MLP, 2, "scalar", 3, 3, scan=True, key=getkey()), np.ones(2, np.float32)
    bayesian = nn.to_bayesian(model)
    assert {type(layer) for layer in bayesian.layers} == {nn.BayesianLinear}

    @eqx.filter_jit
    def compute(model, bayesian, key):
        drawn = nn.sample_posterior(bayesian, key)
        return model(x), nn.inference_mode(bayesian)(x), drawn(x), drawn

    expected, found, of_drawn, drawn = compute(model, bayesian, getkey())
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    assert jax.tree.structure(drawn) == jax.tree.structure(model)
    assert float(of_drawn) != float(expected)


def test_each_layer_of_an_mlp_draws_with_its_own_key(getkey):
    model = filled(nn.MLP, 2, 2, 2, 3, activation=jnp.tanh, scan=True, key=getkey())
    bayesian, key, x = nn.to_bayesian(model), getkey(), np.ones(2, np.float32)
    layers = [*bayesian.layers]
    arrays, static = eqx.partition(layers[1], eqx.is_array)
    taken = [jax.tree.map(operator.itemgetter(index), arrays) for index in range(2)]
    layers[1:2] = [eqx.combine(each, static) for each in taken]

    @eqx.filter_jit
    def outputs(bayesian, layers, key):
        out = x
        for index, each in enumerate(jr.split(jr.clone(key), 4)):
            out = layers[index](out, key=each)
            out = jnp.tanh(out) if index < 3 else out
        return bayesian(x, key=key), out

    assert_close(*outputs(bayesian, layers, key))


def test_projection_of_attention_draws_with_a_key_for_each_row(getkey):
    attention = filled(nn.MultiheadAttention, 2, 4, key=getkey())
    x = normal(getkey(), (3, 4))
    bayesian = nn.to_bayesian(attention, lambda attention: attention.output_proj)
    attended = eqx.tree_at(lambda attention: attention.output_proj, attention, nn.Identity())

    @eqx.filter_jit
    def found_and_expected(attended, bayesian, key):
        keys = jr.split(jr.split(jr.fold_in(key, 2**32 - 1), 4)[3], 3)
        rows = zip(attended(x, x, x), keys, strict=True)
        expected = [bayesian.output_proj(row, key=row_key) for row, row_key in rows]
        return bayesian(x, x, x, key=jr.clone(key)), jnp.stack(expected)

    assert_close(*found_and_expected(attended, bayesian, getkey()))
    with pytest.raises(RuntimeError, match=r"BayesianLinear at .*output_proj needs a key"):
        eqx.filter_eval_shape(bayesian, x, x, x)


def test_convolutions_become_bayesian_too(model, getkey):
    x = normal(getkey(), (2, 4, 4))
    bayesian = nn.to_bayesian(model, prior_scale=2.0, posterior_scale=0.3)
    assert [type(bayesian[i]) for i in (0, 2)] == [nn.BayesianConv, nn.BayesianLinear]
    np.testing.assert_allclose(call(nn.inference_mode(bayesian), x), call(model, x), rtol=1e-6)
    for layer, fan_in in ((bayesian[0], 18), (bayesian[2], 12)):
        spread = jax.nn.softplus(layer.weight_rho)
        np.testing.assert_allclose(spread, 0.3 / np.sqrt(fan_in), rtol=1e-4)
        np.testing.assert_allclose(layer.weight_prior_scale, 2 / np.sqrt(fan_in), rtol=1e-6)


def test_where_selects_layers_and_subtrees(model, getkey):
    bayesian = nn.to_bayesian(model, lambda model: model[2])
    assert [type(layer) for layer in bayesian.layers] == [nn.Conv2d, nn.Lambda, nn.BayesianLinear]
    both = nn.to_bayesian([model, model], lambda models: (models[1].layers[0:3][0], models[0]))
    assert type(both[1][0]) is nn.BayesianConv
    assert type(both[1][2]) is nn.Linear
    assert type(both[0][2]) is nn.BayesianLinear
    # A subclass with its own `__call__` is not replaced.
    bayesian = nn.to_bayesian([Doubled(2, 2, key=getkey()), nn.Linear(2, 2, key=getkey())])
    assert [type(layer) for layer in bayesian] == [Doubled, nn.BayesianLinear]
    with pytest.raises(ValueError, match=r"No node of the model matches linear_or_conv\. It has"):
        nn.to_bayesian(nn.Sequential([nn.LayerNorm(3)]))


def test_means_of_frozen_layers_are_trained(model):
    bayesian = nn.to_bayesian(nn.freeze(model))
    trained = eqx.filter(bayesian, eqx.is_inexact_array)
    assert len(jax.tree.leaves(trained)) == 2 + 4


def test_stack_equals_its_separate_layers(getkey):
    make, shape = lambda key: nn.Conv1d(2, 2, 3, padding=1, key=key), (2, 5)
    stack, prior_scale = filled(nn.ScanStack, make, 3, key=getkey()), np.array(0.5)
    x, key = np.random.default_rng(0).normal(size=shape).astype(np.float32), getkey()

    @eqx.filter_jit
    def stacked_and_one_by_one(stack, key):
        bayesian = nn.to_bayesian(stack, prior_scale=prior_scale)
        layers = [nn.to_bayesian(each, prior_scale=prior_scale) for each in stack.unstack()]
        out, kl = x, 0.0
        for layer, layer_key in zip(layers, jr.split(jr.clone(key), 3), strict=True):
            out, kl = layer(out, key=layer_key), kl + layer.kl()
        return (bayesian(x, key=key), nn.kl_divergence(bayesian)), (out, kl)

    (found, found_kl), (expected, kl) = stacked_and_one_by_one(stack, key)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(found_kl, kl, rtol=1e-5)
    bayesian = nn.to_bayesian(stack, prior_scale=prior_scale)
    drawn = eqx.filter_eval_shape(nn.sample_posterior, bayesian, getkey())
    assert jax.tree.structure(drawn) == jax.tree.structure(stack)
    assert eqx.filter_eval_shape(drawn, x).shape == shape
