"""Estimators, which choose the noise of a layer with random weights."""

import math

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest

import eqxlike as eqx
from eqxlike import nn
from eqxlike.nn._bayesian._gaussian_layer import _random_signs
from tests.bayes.layers.test_bayesian import perturbed
from tests.nn.arrays import filled, normal

NUM_DRAWS = 8000


def make_linear(estimator, getkey):
    layer = nn.BayesianLinear(3, 2, posterior_scale=0.5, estimator=estimator, key=getkey())
    return perturbed(layer, getkey())


def make_conv(estimator, getkey):
    plain = nn.Conv1d(4, 2, 2, groups=2, key=getkey())
    layer = nn.BayesianConv(plain, posterior_scale=0.5, estimator=estimator)
    return perturbed(layer, getkey())


def outputs_of_batch(model, x, key):
    shared_key, own_key = jr.split(key)
    model = nn.with_perturbation(model, shared_key)
    return jax.vmap(lambda x, key: model(x, key=key))(x, jr.split(own_key, len(x)))


@eqx.filter_jit
def _draw(model, x, key):
    return jax.vmap(lambda key: outputs_of_batch(model, x, key))(jr.split(key, NUM_DRAWS))


def draw(model, x, key):
    """Many random outputs for the batch `x`, as float64."""
    return np.asarray(_draw(model, x, key), np.float64)


def squares(rho):
    return np.log1p(np.exp(np.asarray(rho, np.float64))) ** 2


def moments_of_linear(layer, x):
    x = np.asarray(x, np.float64)
    mean = x @ np.asarray(layer.weight_mean).T + np.asarray(layer.bias_mean)
    return mean, x**2 @ squares(layer.weight_rho).T + squares(layer.bias_rho)


def moments_of_conv(layer, x):
    # Each of the two groups has two input channels and one output channel.
    x = np.asarray(x, np.float64).reshape(len(x), 2, 2, -1)
    windows = np.stack([x[..., n : n + 2] for n in range(x.shape[-1] - 1)], axis=-1)

    def correlate(windows, weight, bias):
        return np.einsum("bgikn,gik->bgn", windows, weight) + bias

    mean = correlate(windows, np.asarray(layer.mean.weight), np.asarray(layer.mean.bias))
    return mean, correlate(windows**2, squares(layer.weight_rho), squares(layer.bias_rho))


def covariance(first, second):
    """The sample covariance of two columns, and its standard error."""
    products = (first - first.mean(0)) * (second - second.mean(0))
    return products.mean(0), products.std(0) / math.sqrt(len(products))


def check_moments(outputs, mean, variance):
    assert (abs(outputs.mean(0) - mean) < 5 * np.sqrt(variance / NUM_DRAWS)).all()
    # The variance of n Gaussian draws has a relative standard error of sqrt(2 / n).
    np.testing.assert_allclose(outputs.var(0), variance, rtol=5 * math.sqrt(2 / NUM_DRAWS))


@pytest.mark.parametrize("estimator", ["flipout", "weights"])
def test_outputs_have_the_moments_of_random_weights(estimator, getkey):
    layer, x = make_linear(estimator, getkey), abs(np.asarray(normal(getkey(), (2, 3)))) + 1
    outputs = draw(layer, x, getkey())
    check_moments(outputs, *moments_of_linear(layer, x))
    found, standard_error = covariance(outputs[:, 0], outputs[:, 1])
    shared = np.asarray(x[0] * x[1]) @ squares(layer.weight_rho).T + squares(layer.bias_rho)
    expected = shared if estimator == "weights" else np.zeros(2)
    assert (abs(found - expected) < 5 * standard_error).all()
    assert (shared > 10 * standard_error).all()


@pytest.mark.parametrize("estimator", ["local", "flipout"])
def test_positions_of_an_image_covary_unless_their_noise_is_independent(estimator, getkey):
    layer, x = make_conv(estimator, getkey), np.array(normal(getkey(), (2, 4, 3)))
    x[1] = 1
    outputs = draw(layer, x, getkey())
    mean, variance = moments_of_conv(layer, x)
    check_moments(outputs, mean, variance)
    found, standard_error = covariance(outputs[:, 1, :, 0], outputs[:, 1, :, 1])
    # For a constant image, each position is the same function of the weights.
    expected = np.zeros(2) if estimator == "local" else variance[1, :, 0]
    assert (abs(found - expected) < 5 * standard_error).all()


def test_examples_of_a_flipout_batch_have_different_signs_of_inputs_and_outputs(getkey):
    layer = make_linear("flipout", getkey)
    x = np.repeat(np.array([[0, 0, 0], [1, 1, 1]], np.float32), 16, axis=0)
    noises = eqx.filter_jit(
        lambda layer, x, key: outputs_of_batch(layer, x, key) - jax.vmap(layer.mean_layer())(x)
    )
    noise = np.asarray(noises(layer, x, getkey()))
    # For zero inputs, the noise is the perturbation of the bias times the sign of the output.
    np.testing.assert_allclose(abs(noise[:16]), abs(noise[:1]).repeat(16, axis=0), rtol=1e-3)
    assert {-1.0, 1.0} == set(np.sign(noise[:16, 0]).tolist())
    assert len(np.unique(abs(noise[16:, 0]).round(3))) > 2


def test_signs_of_flipout_are_balanced_and_uncorrelated(getkey):
    # Random bits for 40 signs need more than one 32-bit word.
    signs = jax.jit(jax.vmap(lambda key: _random_signs(key, jnp.zeros(40))))(
        jr.split(getkey(), NUM_DRAWS)
    )
    signs = np.asarray(signs, np.float64)
    tolerance = 5 / math.sqrt(NUM_DRAWS)
    np.testing.assert_array_equal(abs(signs), 1)
    np.testing.assert_allclose(signs.mean(0), 0, atol=tolerance)
    np.testing.assert_allclose(signs.T @ signs / NUM_DRAWS, np.eye(40), atol=tolerance)


def test_last_perturbation_decides_the_noise(getkey):
    layer, x, key = make_linear("flipout", getkey), jnp.ones(3), getkey()

    @eqx.filter_jit
    def draws(layer, key):
        layers = [nn.with_perturbation(layer, jr.key(seed)) for seed in (0, 1)]
        layers.append(nn.with_perturbation(layers[0], jr.key(1)))
        return [each(x, key=jr.clone(key)) for each in layers]

    first, other, again = map(np.asarray, draws(layer, key))
    np.testing.assert_array_equal(other, again)
    assert (first != other).all()


def test_call_and_sample_draw_the_same_weights_with_the_same_key(getkey):
    layer, key, x = make_linear("weights", getkey), getkey(), jnp.ones(3)
    outputs = eqx.filter_jit(lambda layer, key: (layer(x, key=key), layer.sample(jr.clone(key))(x)))
    np.testing.assert_array_equal(*outputs(layer, key))


def test_stacked_layers_have_independent_perturbations(getkey):
    stack = filled(nn.ScanStack, lambda key: nn.Linear(3, 3, key=key), 2, key=getkey())
    model = nn.with_perturbation(nn.to_bayesian(stack, estimator="weights"), getkey())
    x, key = jnp.ones(3), getkey()

    @eqx.filter_jit
    def outputs_and_noises(model, key):
        expected, layers = x, model.unstack()
        for layer, layer_key in zip(layers, jr.split(jr.clone(key), 2), strict=True):
            expected = layer(expected, key=layer_key)
        drawn = [layer.sample(jr.clone(layer.shared_key.key())).weight for layer in layers]
        noises = [each - layer.weight_mean for each, layer in zip(drawn, layers, strict=True)]
        return (model(x, key=key), expected), noises

    outputs, noises = outputs_and_noises(model, key)
    np.testing.assert_allclose(*outputs, rtol=1e-5)
    assert np.not_equal(*noises).all()


def test_raw_keys_are_accepted(getkey):
    layer = make_linear("flipout", getkey)
    arguments = layer, jnp.ones((2, 3)), jr.PRNGKey(0)
    assert eqx.filter_eval_shape(outputs_of_batch, *arguments).shape == (2, 2)


def test_layers_without_shared_noise_stay_unchanged(getkey):
    model = [make_linear("local", getkey), nn.Linear(2, 2, key=getkey()), jnp.ones(3)]
    assert eqx.tree_equal(nn.with_perturbation(model, getkey()), model)


def test_error_of_flipout_without_a_perturbation_names_layer_and_fix(getkey):
    model = nn.BayesianMLP(3, 2, 4, 1, estimator="flipout", key=getkey())
    with pytest.raises(
        RuntimeError,
        match=r"BayesianLinear at BayesianMLP\.layers\[0\] with estimator=\"flipout\" needs a "
        r"perturbation .* call `model = nn\.with_perturbation\(model, key\)`",
    ):
        model(jnp.ones(3), key=getkey())


TAKERS = {
    "BayesianLinear": lambda key, **options: nn.BayesianLinear(2, 2, key=key, **options),
    "around": lambda key, **options: nn.BayesianLinear.around(nn.Linear(2, 2, key=key), **options),
    "BayesianConv": lambda key, **options: nn.BayesianConv(nn.Conv1d(1, 1, 1, key=key), **options),
    "BayesianMLP": lambda key, **options: nn.BayesianMLP(2, 2, 2, 1, key=key, **options),
    "to_bayesian": lambda key, **options: nn.to_bayesian(nn.Linear(2, 2, key=key), **options),
}


@pytest.mark.parametrize("name", TAKERS)
def test_estimator_reaches_every_layer_and_an_unknown_one_is_refused(name, getkey):
    made = TAKERS[name](getkey(), estimator="flipout")
    is_layer = lambda node: isinstance(node, nn.BayesianLayer)
    layers = [node for node in jax.tree.leaves(made, is_leaf=is_layer) if is_layer(node)]
    assert {layer.estimator for layer in layers} == {"flipout"}
    with pytest.raises(
        ValueError,
        match=r"^estimator must be one of 'local', 'flipout', 'weights', got 'global'",
    ):
        TAKERS[name](getkey(), estimator="global")
