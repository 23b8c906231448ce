import math

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import numpyro.distributions as dist
import pytest

import eqxlike as eqx
from eqxlike import nn


def make(getkey, **options):
    """A layer with a different spread of each weight."""
    conv = nn.Conv2d(4, 2, (2, 3), groups=2, key=getkey(), **options)
    layer = nn.BayesianConv(conv, prior_scale=0.7)
    rhos = lambda layer: [rho for rho in (layer.weight_rho, layer.bias_rho) if rho is not None]
    return eqx.tree_at(rhos, layer, [rho + jr.normal(getkey(), rho.shape) for rho in rhos(layer)])


@pytest.fixture
def layer(getkey):
    return make(getkey, padding=1)


def test_inference_mode_computes_what_the_convolution_does(layer, getkey):
    x = jr.normal(getkey(), (4, 5, 5))
    np.testing.assert_array_equal(nn.inference_mode(layer)(x), layer.mean(x))


def test_noise_has_the_moments_of_drawn_weights(getkey):
    # Around the edge a weight meets an entry from the other side.
    layer = make(getkey, padding="SAME", padding_mode="CIRCULAR")
    x, keys = jr.normal(getkey(), (4, 3, 3)), jr.split(getkey(), 8000)
    both = jax.jit(jax.vmap(lambda key: (layer(x, key=key), layer.sample(jr.clone(key))(x))))
    local, drawn = both(keys)
    local, drawn = map(np.asarray, (local, drawn))
    standard_error = drawn.std(0) / math.sqrt(len(keys))
    assert (abs(local.mean(0) - np.asarray(layer.mean(x))) < 5 * standard_error).all()
    np.testing.assert_allclose(local.std(0), drawn.std(0), rtol=0.08)


def test_kl_is_that_of_numpyro(layer):
    def part(mean, rho, prior):
        posterior = dist.Normal(mean, jax.nn.softplus(rho))
        return dist.kl_divergence(posterior, dist.Normal(0.0, jnp.full_like(mean, prior))).sum()

    @eqx.filter_jit
    def ours_and_theirs(layer):
        # Two of the four channels in each group, by a kernel of 2 x 3.
        weight = part(layer.mean.weight, layer.weight_rho, 0.7 / math.sqrt(2 * 6))
        return layer.kl(), weight + part(layer.mean.bias, layer.bias_rho, 0.7)

    np.testing.assert_allclose(*ours_and_theirs(layer), rtol=2e-5)


def test_scales_are_relative_to_the_fan_in(getkey):
    conv = nn.Conv1d(8, 2, 2, key=getkey())
    layer = nn.BayesianConv(conv, prior_scale=0.3, posterior_scale=0.2)
    np.testing.assert_allclose(jax.nn.softplus(layer.weight_rho), 0.2 / 4, rtol=1e-4)
    np.testing.assert_allclose(jax.nn.softplus(layer.bias_rho), 0.2, rtol=1e-4)
    np.testing.assert_allclose(layer.weight_prior_scale, 0.3 / 4, rtol=1e-6)
    np.testing.assert_allclose(layer.bias_prior_scale, 0.3, rtol=1e-6)


def test_convolution_of_one_point_is_a_bayesian_linear(getkey):
    conv, key, x = nn.Conv1d(3, 4, 1, key=getkey()), getkey(), jr.normal(getkey(), (3,))
    linear = eqx.tree_at(
        lambda linear: (linear.weight, linear.bias),
        nn.Linear(3, 4, key=getkey()),
        (conv.weight[:, :, 0], conv.bias[:, 0]),
    )
    expected = nn.BayesianLinear.around(linear)
    layer = nn.BayesianConv(conv)

    @eqx.filter_jit
    def outputs_and_kls(layer, expected):
        outputs = layer(x[:, None], key=key)[:, 0], expected(x, key=jr.clone(key))
        return outputs, (layer.kl(), expected.kl())

    for ours, theirs in outputs_and_kls(layer, expected):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5)


def test_sample_is_a_convolution_of_the_same_kind(layer, getkey):
    drawn = layer.sample(getkey())
    assert type(drawn) is nn.Conv2d
    assert jax.tree.structure(drawn) == jax.tree.structure(layer.mean)
    assert not jnp.any(drawn.weight == layer.mean.weight)
    assert not jnp.any(drawn.bias == layer.mean.bias)


def test_model_functions_see_it_among_others(layer, getkey):
    linear = nn.BayesianLinear(2, 2, key=getkey())
    model = nn.Sequential([layer, nn.Lambda(jnp.ravel), linear])
    total, parts = eqx.filter_jit(
        lambda model: (nn.kl_divergence(model), [model[0].kl(), model[2].kl()])
    )(model)
    np.testing.assert_allclose(total, sum(parts), rtol=1e-6)
    drawn = eqx.filter_eval_shape(nn.sample_posterior, model, getkey())
    assert [type(each) for each in drawn.layers] == [nn.Conv2d, nn.Lambda, nn.Linear]


def test_missing_key_is_refused_with_the_ways_out(layer):
    with pytest.raises(RuntimeError, match=r"BayesianConv needs a key .*inference_mode"):
        layer(jnp.ones((4, 5, 5)))


def test_wrong_shape_says_expected_and_got(layer, getkey):
    with pytest.raises(ValueError, match=r"expected x of shape \(4, height, width\), got .*\(3,"):
        layer(jnp.ones((3, 5, 5)), key=getkey())


def test_complex_convolution_is_refused(getkey):
    with pytest.raises(TypeError, match="BayesianConv needs a real floating dtype, got complex64"):
        nn.BayesianConv(nn.Conv1d(1, 1, 1, dtype=jnp.complex64, key=getkey()))


def test_mean_that_is_no_convolution_is_refused(getkey):
    with pytest.raises(TypeError, match=r"mean must be an nn\.Conv, got a Linear"):
        nn.BayesianConv(nn.Linear(1, 1, key=getkey()))


@pytest.mark.parametrize("name", ["prior_scale", "posterior_scale"])
def test_wrong_scale_is_refused_by_name(name, getkey):
    with pytest.raises(ValueError, match=f"{name} must"):
        nn.BayesianConv(nn.Conv1d(1, 1, 1, key=getkey()), **{name: 0.0})
