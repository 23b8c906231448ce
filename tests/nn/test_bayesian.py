import math

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import numpyro.distributions as dist
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eqxlike import filter_grad, filter_jit, filter_value_and_grad, is_array, nn, tree_at


def perturbed(layer, key):
    """Every array of a layer moved, so that no two of its scales are alike."""
    # By NumPy, which compiles nothing for each shape.
    generator = np.random.default_rng(np.asarray(jr.key_data(key)))

    def move(leaf):
        return jnp.asarray(np.asarray(leaf) + generator.normal(size=leaf.shape).astype(leaf.dtype))

    return jax.tree.map(lambda leaf: move(leaf) if is_array(leaf) else leaf, layer)


@filter_jit
def kl_by_numpyro(layer, prior_scale):
    """The scale of the prior is an argument, so that one program serves them all."""

    def part(mean, rho, prior):
        posterior = dist.Normal(mean, jax.nn.softplus(rho))
        prior = dist.Normal(jnp.zeros_like(mean), jnp.full_like(mean, prior))
        return dist.kl_divergence(posterior, prior).sum()

    weight_prior = prior_scale / math.sqrt(layer.weight_mean.shape[1])
    kl = part(layer.weight_mean, layer.weight_rho, weight_prior)
    if layer.bias_mean is not None:
        kl = kl + part(layer.bias_mean, layer.bias_rho, prior_scale)
    return kl


@given(st.booleans(), st.floats(0.1, 10), st.integers(0, 100))
def test_kl_is_that_of_numpyro(use_bias, prior_scale, seed):
    layer = nn.BayesianLinear(3, 2, use_bias, prior_scale=prior_scale, key=jr.key(seed))
    layer = perturbed(layer, jr.key(seed + 1))
    # The layer's scale is static: compiled, the KL would be another program for each.
    means = tree_at(lambda layer: layer.prior_scale, layer, 1.0)
    expected = kl_by_numpyro(means, np.float32(prior_scale))
    np.testing.assert_allclose(layer.kl(), expected, rtol=2e-5)


def test_kl_is_the_mean_log_ratio_under_the_posterior(getkey):
    layer = perturbed(nn.BayesianLinear(2, 3, key=getkey()), getkey())

    def log_ratio(key):
        drawn = layer.sample(key)
        weight = dist.Normal(layer.weight_mean, jax.nn.softplus(layer.weight_rho))
        bias = dist.Normal(layer.bias_mean, jax.nn.softplus(layer.bias_rho))
        weight_prior = dist.Normal(0.0, layer.weight_prior_scale)
        bias_prior = dist.Normal(0.0, layer.bias_prior_scale)
        return (weight.log_prob(drawn.weight) - weight_prior.log_prob(drawn.weight)).sum() + (
            bias.log_prob(drawn.bias) - bias_prior.log_prob(drawn.bias)
        ).sum()

    ratios = np.asarray(jax.jit(jax.vmap(log_ratio))(jr.split(getkey(), 20_000)))
    standard_error = float(ratios.std()) / math.sqrt(ratios.size)
    assert abs(ratios.mean() - float(filter_jit(layer.kl)())) < 5 * standard_error


def test_kl_vanishes_where_the_posterior_is_the_prior(getkey):
    layer = nn.BayesianLinear(4, 3, prior_scale=0.7, posterior_scale=0.7, key=getkey())
    layer = tree_at(
        lambda layer: (layer.weight_mean, layer.bias_mean), layer, replace_fn=jnp.zeros_like
    )
    np.testing.assert_allclose(layer.kl(), 0, atol=1e-5)


def test_kl_and_its_gradient_stay_finite_where_softplus_underflows(getkey):
    layer = nn.BayesianLinear(2, 2, key=getkey())
    layer = tree_at(lambda layer: layer.weight_rho, layer, jnp.full((2, 2), -1000.0))
    value, gradient = filter_jit(filter_value_and_grad(lambda layer: layer.kl()))(layer)
    assert jnp.isfinite(value)
    # d KL / d rho = s'(rho) (s / p^2 - 1 / s), which tends to -1 as s does to 0.
    np.testing.assert_allclose(gradient.weight_rho, -1)


def test_kl_of_low_precision_weights_is_summed_in_float32(getkey):
    layer = nn.BayesianLinear(30, 30, dtype=jnp.bfloat16, key=getkey())
    layer = tree_at(lambda layer: layer.prior_scale, layer, 0.5)
    exact = jax.tree.map(lambda x: x.astype(jnp.float32) if is_array(x) else x, layer)
    kl = filter_jit(lambda layer: layer.kl())
    assert kl(layer).dtype == jnp.float32
    np.testing.assert_allclose(kl(layer), kl(exact), rtol=1e-2)


@pytest.mark.parametrize("use_bias", [True, False])
def test_noise_has_the_moments_of_drawn_weights(use_bias, getkey):
    layer = perturbed(nn.BayesianLinear(3, 2, use_bias, key=getkey()), getkey())
    x, keys = jr.normal(getkey(), (3,)), jr.split(getkey(), 20_000)
    local = jax.jit(jax.vmap(lambda key: layer(x, key=key)))(keys)
    drawn = jax.jit(jax.vmap(lambda key: layer.sample(key)(x)))(jr.clone(keys))
    mean = nn.inference_mode(layer)(x)
    local, drawn, mean = map(np.asarray, (local, drawn, mean))
    tolerance = 5 * drawn.std(0) / math.sqrt(len(keys))
    assert (abs(local.mean(0) - mean) < tolerance).all()
    assert (abs(drawn.mean(0) - mean) < tolerance).all()
    np.testing.assert_allclose(local.std(0), drawn.std(0), rtol=0.05)


def test_outputs_of_one_call_are_independent_given_the_input(getkey):
    layer = nn.BayesianLinear(3, 2, posterior_scale=1.0, key=getkey())
    keys = jr.split(getkey(), 20_000)
    outputs = jax.jit(jax.vmap(lambda key: layer(jnp.ones(3), key=key)))(keys)
    assert abs(np.corrcoef(outputs.T)[0, 1]) < 0.05


def test_posterior_means_are_a_linear_of_the_same_key(getkey):
    key, x = getkey(), jr.normal(getkey(), (3,))
    layer = nn.BayesianLinear(3, 4, inference=True, key=key)
    np.testing.assert_array_equal(layer(x), nn.Linear(3, 4, key=jr.clone(key))(x))


@pytest.mark.parametrize("scale", [1e-3, 0.1, 3.0])
def test_scales_are_relative_to_the_fan_in(scale, getkey):
    layer = nn.BayesianLinear(16, 2, prior_scale=scale, posterior_scale=scale, key=getkey())
    np.testing.assert_allclose(jax.nn.softplus(layer.weight_rho), scale / 4, rtol=1e-4)
    np.testing.assert_allclose(jax.nn.softplus(layer.bias_rho), scale, rtol=1e-4)
    np.testing.assert_allclose(layer.weight_prior_scale, scale / 4, rtol=1e-6)
    np.testing.assert_allclose(layer.bias_prior_scale, scale, rtol=1e-6)


def test_prior_scale_given_as_an_array_has_a_gradient(getkey):
    layer = nn.BayesianLinear(2, 2, prior_scale=jnp.array(1.0), key=getkey())
    gradient = filter_jit(filter_grad(lambda layer: layer.kl()))
    assert float(gradient(layer).prior_scale) > 0
    constant = nn.BayesianLinear(2, 2, prior_scale=1.0, key=getkey())
    assert gradient(constant).prior_scale is None


def test_missing_key_is_refused_with_the_ways_out(getkey):
    with pytest.raises(RuntimeError, match=r"needs a key .*inference_mode.*sample_posterior"):
        nn.BayesianLinear(2, 2, key=getkey())(jnp.ones(2))


def test_wrong_shape_says_expected_and_got(getkey):
    with pytest.raises(
        ValueError, match=r"BayesianLinear expected x of shape \(2,\), got .*\(3,\)"
    ):
        nn.BayesianLinear(2, 2, key=getkey())(jnp.ones(3), key=getkey())


@pytest.mark.parametrize("name", ["prior_scale", "posterior_scale"])
@pytest.mark.parametrize("bad", [0, -1.0, math.nan, math.inf, jnp.ones(2)])
def test_wrong_scale_is_refused_by_name(name, bad, getkey):
    with pytest.raises(ValueError, match=f"{name} must"):
        nn.BayesianLinear(2, 2, **{name: bad}, key=getkey())


@pytest.mark.parametrize("dtype", [jnp.complex64, jnp.int32])
def test_dtype_that_is_not_real_floating_is_refused(dtype, getkey):
    with pytest.raises(TypeError, match="real floating dtype"):
        nn.BayesianLinear(2, 2, dtype=dtype, key=getkey())


def test_kl_divergence_sums_over_any_pytree(getkey):
    first, second = (nn.BayesianLinear(2, n, key=getkey()) for n in (2, 3))
    tree = {"a": [first, nn.Linear(2, 2, key=getkey())], "b": (nn.Sequential([second]), 3)}
    np.testing.assert_allclose(nn.kl_divergence(tree), first.kl() + second.kl(), rtol=1e-6)


def test_kl_divergence_of_a_plain_model_is_zero(getkey):
    assert nn.kl_divergence(nn.MLP(2, 2, 4, 2, key=getkey())) == 0


def test_sample_posterior_replaces_every_bayesian_layer_and_no_other(getkey):
    plain = nn.Linear(2, 2, key=getkey())
    model = nn.Sequential([nn.BayesianLinear(2, 2, key=getkey()), plain, nn.Lambda(jnp.tanh)])
    drawn = nn.sample_posterior(model, getkey())
    assert type(drawn[0]) is nn.Linear
    assert drawn[1] == plain
    assert drawn[2] == model[2]


def test_drawn_layers_are_independent(getkey):
    layer = nn.BayesianLinear(30, 30, key=getkey())
    drawn = nn.sample_posterior([layer, layer], getkey())
    first, second = (np.ravel(d.weight) - np.ravel(layer.weight_mean) for d in drawn)
    assert abs(np.corrcoef(first, second)[0, 1]) < 0.2


def test_drawn_network_needs_no_key(getkey):
    model = nn.BayesianMLP(2, 3, 8, 2, key=getkey())
    drawn = nn.sample_posterior(model, getkey())
    call = filter_jit(lambda model, x, key: model(x, key=key))
    x = jnp.ones(2)
    np.testing.assert_array_equal(call(drawn, x, None), call(drawn, x, getkey()))


def test_drawn_scalar_layer_without_bias_keeps_its_form(getkey):
    drawn = nn.BayesianLinear("scalar", 2, use_bias=False, key=getkey()).sample(getkey())
    assert drawn.bias is None
    assert drawn(jnp.array(1.0)).shape == (2,)


def test_spread_of_network_outputs_under_the_prior_does_not_grow_with_width(getkey):
    def spread(width):
        model = nn.BayesianMLP(
            4, "scalar", width, 1, jnp.tanh, prior_scale=1.0, posterior_scale=1.0, key=getkey()
        )
        means = lambda model: [
            mean for layer in model.layers for mean in (layer.weight_mean, layer.bias_mean)
        ]
        prior = tree_at(means, model, replace_fn=jnp.zeros_like)
        keys = jr.split(getkey(), 2000)
        draw = jax.jit(jax.vmap(lambda key: nn.sample_posterior(prior, key)(jnp.ones(4))))
        return np.std(draw(keys))

    np.testing.assert_allclose(spread(8), spread(128), rtol=0.1)


def test_mlp_of_depth_zero_is_one_layer(getkey):
    key = getkey()
    model = nn.BayesianMLP(2, 3, 8, 0, inference=True, key=key)
    assert len(model.layers) == 1
    assert model(jnp.ones(2)).shape == (3,)


def test_mlp_refuses_a_wrong_depth(getkey):
    with pytest.raises(ValueError, match="depth must be an integer of at least 0"):
        nn.BayesianMLP(2, 2, 2, -1, key=getkey())
