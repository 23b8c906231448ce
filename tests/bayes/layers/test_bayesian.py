import math

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import numpyro.distributions as dist
import pytest

import eqxlike as eqx
from eqxlike import filter_jit, filter_value_and_grad, is_array, nn, tree_at
from tests.nn.arrays import normal


def perturbed(layer, key):
    """Adds noise to every array of a layer, so that all scales differ."""
    # NumPy does not compile a program for each shape.
    generator = np.random.default_rng(np.asarray(jr.key_data(key)))

    def move(leaf):
        return jnp.asarray(np.asarray(leaf) + generator.normal(size=leaf.shape).astype(leaf.dtype))

    return jax.tree.map(lambda leaf: move(leaf) if is_array(leaf) else leaf, layer)


def kl_by_numpyro(layer, fan_in, prior_scale):
    def part(mean, rho, prior):
        posterior = dist.Normal(mean, jax.nn.softplus(rho))
        return dist.kl_divergence(posterior, dist.Normal(0.0, jnp.full_like(mean, prior))).sum()

    mean = layer.mean_layer()
    kl = part(mean.weight, layer.weight_rho, prior_scale / math.sqrt(fan_in))
    return kl if mean.bias is None else kl + part(mean.bias, layer.bias_rho, prior_scale)


def test_kl_equals_numpyro(getkey):
    conv = nn.Conv2d(4, 2, (2, 3), groups=2, key=getkey())
    cases = [
        (nn.BayesianLinear(3, 2, prior_scale=0.3, key=getkey()), 3, 0.3),
        (nn.BayesianLinear(3, 2, False, prior_scale=7.0, key=getkey()), 3, 7.0),
        # Each group has two of the four channels. The kernel is 2 x 3.
        (nn.BayesianConv(conv, prior_scale=0.7), 2 * 6, 0.7),
    ]
    layers = [perturbed(layer, getkey()) for layer, *_ in cases]
    both = filter_jit(
        lambda layers: [
            (layer.kl(), kl_by_numpyro(layer, *case))
            for layer, (_, *case) in zip(layers, cases, strict=True)
        ]
    )
    for found, expected in both(layers):
        np.testing.assert_allclose(found, expected, rtol=2e-5)


def test_kl_and_its_gradient_stay_finite_where_softplus_underflows(getkey):
    layer = nn.BayesianLinear(2, 2, key=getkey())
    layer = tree_at(lambda layer: layer.weight_rho, layer, jnp.full((2, 2), -1000.0))
    value, gradient = filter_jit(filter_value_and_grad(lambda layer: layer.kl()))(layer)
    assert np.isfinite(value)
    # d KL / d rho = s'(rho) (s / p^2 - 1 / s) tends to -1 as s tends to 0.
    np.testing.assert_allclose(gradient.weight_rho, -1)


def test_kl_of_bfloat16_weights_is_summed_in_float32(getkey):
    layer = nn.BayesianLinear(30, 30, dtype=jnp.bfloat16, key=getkey())
    layer = tree_at(lambda layer: layer.prior_scale, layer, 0.5)
    exact = jax.tree.map(
        lambda x: jnp.asarray(np.asarray(x, np.float32)) if is_array(x) else x, layer
    )
    kl = filter_jit(lambda layer: layer.kl())
    assert kl(layer).dtype == jnp.float32
    np.testing.assert_allclose(kl(layer), kl(exact), rtol=1e-2)


def test_posterior_means_equal_a_linear_layer_with_the_same_key(getkey):
    key, x = getkey(), normal(getkey(), (3,))

    @filter_jit
    def outputs(key):
        layer = nn.BayesianLinear(3, 4, inference=True, key=key)
        return layer(x), nn.Linear(3, 4, key=jr.clone(key))(x)

    np.testing.assert_array_equal(*outputs(key))


def test_mlp_applies_its_activation_between_layers(getkey):
    model = nn.BayesianMLP(2, 3, 4, 1, activation=jnp.tanh, inference=True, key=getkey())
    (first, last), x = model.layers, jnp.ones(2)
    np.testing.assert_allclose(model(x), last(jnp.tanh(first(x))), rtol=1e-6)


def linear(key, **options):
    return nn.BayesianLinear(2, 2, key=key, **options)


def convolution(key, dtype=None, **options):
    return nn.BayesianConv(nn.Conv1d(2, 2, 1, dtype=dtype, key=key), **options)


BAD_INPUT = [
    (
        lambda key: linear(key)(jnp.ones(2)),
        *(RuntimeError, r"BayesianLinear needs a key .*inference_mode.*sample_posterior"),
    ),
    (
        lambda key: linear(key)(jnp.ones(3), key=key),
        *(ValueError, r"BayesianLinear expected x of shape \(2,\), got .*\(3,\)"),
    ),
    (
        lambda key: convolution(key)(jnp.ones((3, 5)), key=key),
        *(ValueError, r"expected x of shape \(2, length\), got .*\(3,"),
    ),
    (lambda key: nn.BayesianMLP(2, 2, 2, -1, key=key), ValueError, "depth .* at least 0"),
    (lambda key: linear(key, dtype=jnp.int32), TypeError, "real floating dtype"),
    (lambda key: convolution(key, jnp.complex64), TypeError, "real floating dtype, got complex64"),
    (lambda key: nn.BayesianConv(nn.Linear(1, 1, key=key)), TypeError, r"nn\.Conv, got a Linear"),
    (lambda key: Incomplete(), TypeError, "sample"),
]


class Incomplete(nn.BayesianLayer):
    def kl(self):
        return jnp.zeros(())


def test_error_of_bad_input_names_the_ways_out(getkey):
    for make, error, message in BAD_INPUT:
        with jax.debug_key_reuse(False), pytest.raises(error, match=message):
            make(getkey())


@pytest.mark.parametrize("name", ["prior_scale", "posterior_scale"])
def test_wrong_scale_is_refused_by_name(name, getkey):
    for bad in (0, -1.0, math.nan, math.inf, jnp.ones(2)):
        for make in (linear, convolution):
            with pytest.raises(ValueError, match=f"{name} must"):
                make(getkey(), **{name: bad})


def test_sample_posterior_replaces_exactly_the_bayesian_layers(getkey):
    plain = nn.Linear(2, 2, key=getkey())
    model = nn.Sequential([nn.BayesianLinear(2, 2, key=getkey()), plain, nn.Lambda(jnp.tanh)])
    drawn = filter_jit(nn.sample_posterior)(model, getkey())
    assert type(drawn[0]) is nn.Linear
    assert np.array_equal(drawn[1].weight, plain.weight)
    assert np.array_equal(drawn[1].bias, plain.bias)
    assert drawn[2] == model[2]


def test_drawn_layers_are_independent(getkey):
    layer = nn.BayesianLinear(30, 30, key=getkey())
    drawn = filter_jit(nn.sample_posterior)([layer, layer], getkey())
    first, second = (np.ravel(d.weight) - np.ravel(layer.weight_mean) for d in drawn)
    assert abs(np.corrcoef(first, second)[0, 1]) < 0.2


class Shift(nn.BayesianLayer):
    """A layer of a user."""

    mean: jax.Array

    def kl(self):
        return self.mean**2 / 2

    def sample(self, key):
        return nn.Lambda(jnp.negative)


class Autoencoder(eqx.Module):
    """Has methods with the names of a `BayesianLayer`, but other meanings."""

    decoder: nn.Linear

    def kl(self, mean, variance):
        return mean**2 + variance

    def sample(self, key):
        return self.decoder(jax.random.normal(key, (2,)))


def test_bayesian_layer_of_a_user_has_a_kl_and_is_sampled(getkey):
    model = [Shift(jnp.array(2.0)), nn.BayesianLinear(2, 2, key=getkey())]
    total, one = filter_jit(lambda model: (nn.kl_divergence(model), model[1].kl()))(model)
    np.testing.assert_allclose(total, 2 + np.asarray(one), rtol=1e-6)
    assert nn.sample_posterior(model, getkey())[0](1.0) == -1.0


def test_module_with_methods_of_the_same_names_is_no_bayesian_layer(getkey):
    model = Autoencoder(nn.Linear(2, 2, key=getkey()))
    assert nn.kl_divergence(model) == 0
    assert nn.sample_posterior(model, getkey()) == model
