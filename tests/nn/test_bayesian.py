import math

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import numpyro.distributions as dist
import pytest

import eqxlike as eqx
from eqxlike import filter_grad, filter_jit, filter_value_and_grad, is_array, nn, tree_at
from tests.nn.arrays import normal


def perturbed(layer, key):
    """Every array of a layer moved, so that no two of its scales are alike."""
    # By NumPy, which compiles nothing for each shape.
    generator = np.random.default_rng(np.asarray(jr.key_data(key)))

    def move(leaf):
        return jnp.asarray(np.asarray(leaf) + generator.normal(size=leaf.shape).astype(leaf.dtype))

    return jax.tree.map(lambda leaf: move(leaf) if is_array(leaf) else leaf, layer)


def kl_by_numpyro(layer, prior_scale):
    def part(mean, rho, prior):
        posterior = dist.Normal(mean, jax.nn.softplus(rho))
        prior = dist.Normal(jnp.zeros_like(mean), jnp.full_like(mean, prior))
        return dist.kl_divergence(posterior, prior).sum()

    weight_prior = prior_scale / math.sqrt(layer.weight_mean.shape[1])
    kl = part(layer.weight_mean, layer.weight_rho, weight_prior)
    if layer.bias_mean is not None:
        kl = kl + part(layer.bias_mean, layer.bias_rho, prior_scale)
    return kl


@pytest.mark.parametrize(("use_bias", "prior_scale"), [(True, 0.3), (False, 7.0)])
def test_kl_is_that_of_numpyro(use_bias, prior_scale, getkey):
    layer = nn.BayesianLinear(3, 2, use_bias, prior_scale=prior_scale, key=getkey())
    layer = perturbed(layer, getkey())
    both = filter_jit(lambda layer: (layer.kl(), kl_by_numpyro(layer, prior_scale)))
    found, expected = both(layer)
    np.testing.assert_allclose(found, expected, rtol=2e-5)


def test_kl_and_its_gradient_stay_finite_where_softplus_underflows(getkey):
    layer = nn.BayesianLinear(2, 2, key=getkey())
    layer = tree_at(lambda layer: layer.weight_rho, layer, jnp.full((2, 2), -1000.0))
    value, gradient = filter_jit(filter_value_and_grad(lambda layer: layer.kl()))(layer)
    assert np.isfinite(value)
    # d KL / d rho = s'(rho) (s / p^2 - 1 / s), which tends to -1 as s does to 0.
    np.testing.assert_allclose(gradient.weight_rho, -1)


def test_kl_of_low_precision_weights_is_summed_in_float32(getkey):
    layer = nn.BayesianLinear(30, 30, dtype=jnp.bfloat16, key=getkey())
    layer = tree_at(lambda layer: layer.prior_scale, layer, 0.5)
    exact = jax.tree.map(
        lambda x: jnp.asarray(np.asarray(x, np.float32)) if is_array(x) else x, layer
    )
    kl = filter_jit(lambda layer: layer.kl())
    assert kl(layer).dtype == jnp.float32
    np.testing.assert_allclose(kl(layer), kl(exact), rtol=1e-2)


def test_noise_without_a_bias_has_the_moments_of_drawn_weights(getkey):
    layer = perturbed(nn.BayesianLinear(3, 2, False, key=getkey()), getkey())
    x, keys = normal(getkey(), (3,)), jr.split(getkey(), 20_000)

    @jax.jit
    def outputs(keys):
        local = jax.vmap(lambda key: layer(x, key=key))(keys)
        drawn = jax.vmap(lambda key: layer.sample(key)(x))(jr.clone(keys))
        return local, drawn, nn.inference_mode(layer)(x)

    local, drawn, mean = outputs(keys)
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
    key, x = getkey(), normal(getkey(), (3,))

    @filter_jit
    def outputs(key):
        layer = nn.BayesianLinear(3, 4, inference=True, key=key)
        return layer(x), nn.Linear(3, 4, key=jr.clone(key))(x)

    np.testing.assert_array_equal(*outputs(key))


def test_scales_are_relative_to_the_fan_in(getkey):
    scale = 0.1
    layer = nn.BayesianLinear(16, 2, prior_scale=scale, posterior_scale=scale, key=getkey())
    np.testing.assert_allclose(jax.nn.softplus(layer.weight_rho), scale / 4, rtol=1e-4)
    np.testing.assert_allclose(jax.nn.softplus(layer.bias_rho), scale, rtol=1e-4)
    np.testing.assert_allclose(layer.weight_prior_scale, scale / 4, rtol=1e-6)
    np.testing.assert_allclose(layer.bias_prior_scale, scale, rtol=1e-6)
    conv = nn.Conv1d(8, 2, 2, key=getkey())
    layer = nn.BayesianConv(conv, prior_scale=0.3, posterior_scale=0.2)
    np.testing.assert_allclose(jax.nn.softplus(layer.weight_rho), 0.2 / 4, rtol=1e-4)
    np.testing.assert_allclose(jax.nn.softplus(layer.bias_rho), 0.2, rtol=1e-4)
    np.testing.assert_allclose(layer.weight_prior_scale, 0.3 / 4, rtol=1e-6)
    np.testing.assert_allclose(layer.bias_prior_scale, 0.3, rtol=1e-6)


def test_prior_scale_given_as_an_array_has_a_gradient(getkey):
    layer = nn.BayesianLinear(2, 2, prior_scale=jnp.array(1.0), key=getkey())
    gradient = filter_jit(filter_grad(lambda layer: layer.kl()))
    assert float(gradient(layer).prior_scale) > 0
    constant = nn.BayesianLinear(2, 2, prior_scale=1.0, key=getkey())
    assert gradient(constant).prior_scale is None


def linear(key, **options):
    return nn.BayesianLinear(2, 2, key=key, **options)


def convolution(key, dtype=None, **options):
    return nn.BayesianConv(nn.Conv1d(2, 2, 1, dtype=dtype, key=key), **options)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (
            lambda key: linear(key)(jnp.ones(2)),
            RuntimeError,
            r"BayesianLinear needs a key .*inference_mode.*sample_posterior",
        ),
        (
            lambda key: convolution(key)(jnp.ones((2, 5))),
            RuntimeError,
            r"BayesianConv needs a key .*inference_mode",
        ),
        (
            lambda key: linear(key)(jnp.ones(3), key=key),
            ValueError,
            r"BayesianLinear expected x of shape \(2,\), got .*\(3,\)",
        ),
        (
            lambda key: convolution(key)(jnp.ones((3, 5)), key=key),
            ValueError,
            r"expected x of shape \(2, length\), got .*\(3,",
        ),
        (lambda key: linear(key, dtype=jnp.int32), TypeError, "real floating dtype"),
        (lambda key: linear(key, dtype=jnp.complex64), TypeError, "real floating dtype"),
        (
            lambda key: convolution(key, jnp.complex64),
            TypeError,
            "BayesianConv needs a real floating dtype, got complex64",
        ),
        (
            lambda key: nn.BayesianConv(nn.Linear(1, 1, key=key)),
            TypeError,
            r"mean must be an nn\.Conv, got a Linear",
        ),
        (
            lambda key: nn.BayesianMLP(2, 2, 2, -1, key=key),
            ValueError,
            "depth must be an integer of at least 0",
        ),
    ],
)
def test_errors_say_what_was_expected_and_the_ways_out(make, error, message, getkey):
    with jax.debug_key_reuse(False), pytest.raises(error, match=message):
        make(getkey())


@pytest.mark.parametrize("name", ["prior_scale", "posterior_scale"])
def test_wrong_scale_is_refused_by_name(name, getkey):
    for bad in (0, -1.0, math.nan, math.inf, jnp.ones(2)):
        for make in (linear, convolution):
            with pytest.raises(ValueError, match=f"{name} must"):
                make(getkey(), **{name: bad})


def test_kl_divergence_sums_over_any_pytree(getkey):
    first, second = (nn.BayesianLinear(2, n, key=getkey()) for n in (2, 3))
    tree = {"a": [first, nn.Linear(2, 2, key=getkey())], "b": (nn.Sequential([second]), 3)}
    total, one, other = filter_jit(lambda: (nn.kl_divergence(tree), first.kl(), second.kl()))()
    np.testing.assert_allclose(total, np.asarray(one) + np.asarray(other), rtol=1e-6)
    assert nn.kl_divergence(tree["a"][1:]) == 0


def test_sample_posterior_replaces_every_bayesian_layer_and_no_other(getkey):
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


def test_drawn_scalar_layer_without_bias_keeps_its_form(getkey):
    drawn = nn.BayesianLinear("scalar", 2, use_bias=False, key=getkey()).sample(getkey())
    assert drawn.bias is None
    assert drawn(jnp.array(1.0)).shape == (2,)


def test_mlp_of_depth_zero_is_one_layer(getkey):
    key = getkey()
    model = nn.BayesianMLP(2, 3, 8, 0, inference=True, key=key)
    assert len(model.layers) == 1
    assert model(jnp.ones(2)).shape == (3,)


def make_convolution(getkey, **options):
    """A layer with a different spread of each weight."""
    conv = nn.Conv2d(4, 2, (2, 3), groups=2, key=getkey(), **options)
    layer = nn.BayesianConv(conv, prior_scale=0.7)
    rhos = lambda layer: [rho for rho in (layer.weight_rho, layer.bias_rho) if rho is not None]
    return eqx.tree_at(
        rhos,
        layer,
        [
            jnp.asarray(np.asarray(rho) + np.asarray(normal(getkey(), rho.shape)))
            for rho in rhos(layer)
        ],
    )


@pytest.fixture
def layer(getkey):
    return make_convolution(getkey, padding=1)


def test_noise_of_a_convolution_has_the_moments_of_drawn_weights(getkey):
    # Around the edge a weight meets an entry from the other side.
    layer = make_convolution(getkey, padding="SAME", padding_mode="CIRCULAR")
    x, keys = normal(getkey(), (4, 3, 3)), jr.split(getkey(), 8000)

    @jax.jit
    def outputs(keys):
        both = jax.vmap(lambda key: (layer(x, key=key), layer.sample(jr.clone(key))(x)))
        return *both(keys), layer.mean(x)

    local, drawn, mean = map(np.asarray, outputs(keys))
    standard_error = drawn.std(0) / math.sqrt(len(keys))
    assert (abs(local.mean(0) - mean) < 5 * standard_error).all()
    np.testing.assert_allclose(local.std(0), drawn.std(0), rtol=0.08)


def test_kl_of_a_convolution_is_that_of_numpyro(layer):
    def part(mean, rho, prior):
        posterior = dist.Normal(mean, jax.nn.softplus(rho))
        return dist.kl_divergence(posterior, dist.Normal(0.0, jnp.full_like(mean, prior))).sum()

    @eqx.filter_jit
    def ours_and_theirs(layer):
        # Two of the four channels in each group, by a kernel of 2 x 3.
        weight = part(layer.mean.weight, layer.weight_rho, 0.7 / math.sqrt(2 * 6))
        return layer.kl(), weight + part(layer.mean.bias, layer.bias_rho, 0.7)

    np.testing.assert_allclose(*ours_and_theirs(layer), rtol=2e-5)


def test_sample_and_mean_are_convolutions_of_the_same_kind(layer, getkey):
    drawn = filter_jit(lambda layer, key: layer.sample(key))(layer, getkey())
    assert type(drawn) is nn.Conv2d
    x = normal(getkey(), (4, 5, 5))
    outputs = filter_jit(lambda layer: (nn.inference_mode(layer)(x), layer.mean(x)))
    np.testing.assert_array_equal(*outputs(layer))
    assert jax.tree.structure(drawn) == jax.tree.structure(layer.mean)
    for one, other in ((drawn.weight, layer.mean.weight), (drawn.bias, layer.mean.bias)):
        assert np.not_equal(one, other).all()
