"""`LoRALinear` computes its formula, trains its correction and merges into a `Linear`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqxlike as eqx
from eqxlike import nn
from tests.nn.arrays import assert_close, filled, normal

call = eqx.filter_jit(lambda model, x: model(x))


def moved(layer, key):
    """A layer whose correction is not zero."""
    up = normal(key, layer.up.shape, layer.up.dtype)
    return eqx.tree_at(lambda layer: layer.up, layer, up)


@pytest.fixture
def layer(getkey):
    linear = nn.Linear(5, 4, key=getkey())
    return moved(nn.LoRALinear(linear, 2, alpha=3.0, key=getkey()), getkey())


def total(layer):
    return layer(np.ones(5, np.float32)).sum()


def adapted(model, key, **options):
    def make(layer, key):
        return nn.LoRALinear(layer, 2, **options, key=key)

    return nn.replace_layers(model, nn.Linear, make, key=key)


def test_output_equals_the_formula(layer, getkey):
    x = np.asarray(normal(getkey(), (5,)), np.float64)
    base, down, up = (np.float64(each) for each in (layer.linear.weight, layer.down, layer.up))
    expected = base @ x + np.asarray(layer.linear.bias) + 3.0 / 2 * up @ (down @ x)
    assert_close(call(layer, jnp.asarray(x, jnp.float32)), expected)


def test_alpha_is_the_rank_by_default(getkey):
    layer = nn.LoRALinear(nn.Linear(5, 4, key=getkey()), 2, key=getkey())
    ones = eqx.tree_at(lambda layer: layer.up, layer, jnp.ones((4, 2)))
    weights = eqx.filter_jit(lambda *layers: [each.weight for each in layers])(ones, layer)
    expected = np.ones((4, 2), np.float32) @ np.asarray(layer.down)
    np.testing.assert_allclose(np.subtract(*weights), expected, rtol=1e-4)


def test_correction_has_a_gradient_and_the_base_only_if_it_is_trained(layer, getkey):
    gradient = eqx.filter_jit(eqx.filter_grad(total))(layer)
    assert gradient.linear.weight is None
    assert gradient.linear.bias is None
    assert np.any(gradient.up)
    assert np.any(gradient.down)
    arrays, static = eqx.partition(layer, eqx.is_array)
    gradient = jax.jit(jax.grad(lambda arrays: total(eqx.combine(arrays, static))))(arrays)
    assert not np.any(gradient.linear.weight)
    assert np.any(gradient.up)
    linear = nn.Linear(5, 4, key=getkey())
    trained = nn.LoRALinear(linear, 2, train_base=True, key=getkey())
    gradient = eqx.filter_jit(eqx.filter_grad(total))(trained)
    np.testing.assert_array_equal(gradient.linear.weight, np.ones((4, 5)))


def test_unmerging_restores_every_bit(getkey):
    linear = nn.Linear(30, 30, key=getkey())
    layer = moved(nn.LoRALinear(linear, 4, alpha=1e3, key=getkey()), getkey())
    merged = layer.merge(keep_parts=True)
    assert isinstance(merged, nn.Linear)
    assert (merged.in_features, merged.out_features, merged.use_bias) == (30, 30, True)
    np.testing.assert_array_equal(merged.weight, layer.merge().weight)
    np.testing.assert_array_equal(merged.bias, linear.bias)
    again = merged.unmerge()
    assert eqx.tree_equal(again, layer)
    assert again.linear.weight.tobytes() == linear.weight.tobytes()


def test_mlp_with_adapted_layers_computes_the_same_and_merges(getkey):
    # There are two stacked layers between the first and the last layer.
    model, x = filled(nn.MLP, 3, 2, 4, 3, scan=True, key=getkey()), np.ones(3, np.float32)
    lora = adapted(model, getkey())
    stacked = lora.layers[1]
    assert (stacked.down.shape, stacked.up.shape) == ((2, 2, 4), (2, 4, 2))
    assert np.not_equal(*stacked.down).all()
    changed = nn.replace_layers(lora, nn.LoRALinear, lambda layer: moved(layer, getkey()))

    @eqx.filter_jit
    def merged_and_outputs(*models):
        merged = nn.replace_layers(models[-1], nn.LoRALinear, lambda layer: layer.merge())
        return merged, [each(x) for each in (*models, merged)]

    merged, (plain, unchanged, expected, out) = merged_and_outputs(model, lora, changed)
    np.testing.assert_allclose(unchanged, plain, rtol=1e-6)
    assert jax.tree.structure(merged) == jax.tree.structure(model)
    np.testing.assert_allclose(out, expected, rtol=1e-4)
    assert not np.allclose(out, plain)


def test_factors_in_float32_are_trained_next_to_weights_in_bfloat16(getkey):
    linear = nn.Linear(5, 4, dtype=jnp.bfloat16, key=getkey())
    layer = moved(nn.LoRALinear(linear, 2, dtype="float32", key=getkey()), getkey())
    x = jnp.ones(5, jnp.bfloat16)
    in_bfloat16 = nn.Policy.parse("bfloat16").cast_to_compute(layer)
    assert np.array_equal(call(layer, x), call(in_bfloat16, x))
    gradient = eqx.filter_grad(lambda layer: layer(x).sum())(layer)
    found = [gradient.down.dtype, gradient.up.dtype, layer.merge().weight.dtype]
    assert found == [jnp.float32, jnp.float32, jnp.bfloat16]


def test_initializer_is_called_with_the_shape_of_a_map_from_input_to_rank(getkey):
    seen = []

    def initializer(key, shape, dtype):
        seen.append((shape, dtype))
        return jnp.zeros(shape, dtype)

    linear = nn.Linear(5, 4, key=getkey())
    layer = nn.LoRALinear(linear, 2, weight_init=initializer, key=getkey())
    assert seen == [((5, 2), jnp.float32)]
    assert layer.down.shape == (2, 5)


def test_layer_has_the_properties_of_a_linear_and_merges_into_one(layer, getkey):
    merged, x = layer.merge(), normal(getkey(), (5,))
    for each in (layer, merged):
        assert (each.in_features, each.out_features, each.use_bias) == (5, 4, True)
        np.testing.assert_array_equal(each.bias, layer.linear.bias)
    assert type(merged) is nn.Linear
    assert_close(call(merged, x), call(layer, x))
    assert len(jax.tree.leaves(eqx.filter(merged, eqx.is_inexact_array))) == 2
    with pytest.raises(ValueError, match=r"LoRALinear expected x of shape \(5,\), got .*\(3,\)"):
        layer(jnp.ones(3))


def test_wrong_arguments_are_refused(getkey):
    linear = nn.Linear(2, 2, key=getkey())
    with pytest.raises(ValueError, match="rank must be an integer of at least 1, got 0"):
        nn.LoRALinear(linear, 0, key=getkey())
    with pytest.raises(ValueError, match="alpha must be positive and finite"):
        nn.LoRALinear(linear, 1, alpha=0.0, key=getkey())
    with pytest.raises(TypeError, match=r"linear must be an nn\.Linear, got a Identity"):
        nn.LoRALinear(nn.Identity(), 1, key=getkey())
