"""Splits models with random weights into means and scales, and rebuilds them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqxlike as eqx
from eqxlike import nn
from eqxlike.nn._bayesian import (
    bayesian_from_parts,
    layers_with_estimators,
    posterior_scales,
    prior_scales,
)
from eqxlike.nn._bayesian._gaussian_layer import rho_of
from tests.bayes.layers.test_bayesian import Shift

LAYERS = {
    "linear": lambda **options: nn.BayesianLinear(3, 2, **options),
    "scalar without bias": lambda **options: nn.BayesianLinear(
        "scalar", "scalar", False, **options
    ),
    "conv": lambda key, **options: nn.BayesianConv(
        nn.Conv1d(2, 4, 2, groups=2, key=key), **options
    ),
    "conv without bias": lambda key, **options: nn.BayesianConv(
        nn.Conv2d(2, 1, 2, use_bias=False, key=key), **options
    ),
}


class Scaled(eqx.Module):
    """A user's Module with a layer and its own arrays."""

    layer: object
    scale: jax.Array
    activation: object = jnp.tanh

    def __call__(self, x, *, key=None):
        return self.scale * self.activation(self.layer(x, key=key))


@pytest.fixture
def network(getkey):
    """Linear layers and convolutions in containers and Modules. One is stacked, one is frozen."""
    return {
        "first": (nn.Conv1d(2, 3, 2, key=getkey()), nn.LayerNorm(3)),
        "second": Scaled(nn.Linear(3, 2, use_bias=False, key=getkey()), jnp.array(2.0)),
        "stack": nn.ScanStack(lambda key: nn.Linear(2, 2, key=key), 3, key=getkey()),
        "frozen": nn.freeze(nn.Linear(2, 2, key=getkey())),
    }


@pytest.fixture
def model(network):
    """`network` with Bayesian layers. The frozen layer is unchanged."""
    where = lambda network: (network["first"], network["second"], network["stack"])
    return nn.to_bayesian(network, where)


@pytest.mark.parametrize("name", LAYERS)
def test_scales_are_those_of_a_new_layer(name, getkey):
    layer = LAYERS[name](prior_scale=2.0, posterior_scale=0.3, key=getkey())
    mean, posterior, prior = eqx.filter_jit(
        lambda layer: (layer.mean_layer(), layer.posterior_scales(), layer.prior_scales())
    )(layer)
    fan_in = mean.weight[0].size
    np.testing.assert_allclose(posterior.weight, 0.3 / np.sqrt(fan_in), rtol=1e-5)
    np.testing.assert_allclose(prior.weight, 2.0 / np.sqrt(fan_in), rtol=1e-6)
    if mean.bias is not None:
        np.testing.assert_allclose(posterior.bias, 0.3, rtol=1e-5)
        np.testing.assert_allclose(prior.bias, 2.0, rtol=1e-6)
    assert jax.tree.structure(posterior) == jax.tree.structure(prior) == jax.tree.structure(mean)


# The largest relative errors of XLA's functions in float32, in units of 2**-24, rounded up. They
# were measured for the arguments that result from the scales below.
EXPM1, LOG, EXP, LOG1P = 6, 2, 2, 4


def test_scale_of_any_size_survives_the_round_trip_with_its_gradient():
    scales = jnp.array([1e-30, 1e-12, 1e-3, 1.0, 50.0, 1e4])
    back = jax.value_and_grad(lambda scale: jax.nn.softplus(rho_of(scale)))
    found, gradient = jax.jit(jax.vmap(back))(scales)
    np.testing.assert_allclose(found, scales, rtol=1e-5)
    np.testing.assert_allclose(gradient, 1, rtol=1e-5)


def test_posterior_mean_is_the_original_network(network, model):
    mean = nn.posterior_mean(model)
    assert jax.tree.structure(mean) == jax.tree.structure(network)
    # Comparing NumPy arrays compiles nothing.
    arrays = lambda leaf: np.asarray(leaf) if eqx.is_array(leaf) else leaf
    assert eqx.tree_equal(jax.tree.map(arrays, mean), jax.tree.map(arrays, network))


@pytest.mark.parametrize("scales_of", [posterior_scales, prior_scales])
def test_scales_have_the_paths_of_the_means(scales_of, model):
    mean, scales = nn.posterior_mean(model), scales_of(model)
    is_none = lambda leaf: leaf is None
    mean_leaves = jax.tree_util.tree_leaves_with_path(mean, is_leaf=is_none)
    scale_leaves = jax.tree_util.tree_leaves_with_path(scales, is_leaf=is_none)
    assert [path for path, _ in mean_leaves] == [path for path, _ in scale_leaves]
    scales = {jax.tree_util.keystr(path): leaf for path, leaf in scale_leaves if leaf is not None}
    shapes = {path: leaf.shape for path, leaf in scales.items()}
    assert shapes == {
        "['first'][0].weight": (3, 2, 2),
        "['first'][0].bias": (3, 1),
        "['second'].layer.weight": (2, 3),
        "['stack'].layers.weight": (3, 2, 2),
        "['stack'].layers.bias": (3, 2),
    }


def test_stacked_layers_keep_their_learnt_prior_scales(getkey):
    stack = nn.ScanStack(lambda key: nn.Linear(4, 4, key=key), 2, key=getkey())
    model = nn.to_bayesian(stack, prior_scale=jnp.array(1.0))
    assert model.layers.prior_scale.shape == (2,)
    model = eqx.tree_at(lambda model: model.layers.prior_scale, model, jnp.array([2.0, 6.0]))
    first, second = eqx.filter_jit(lambda model: prior_scales(model).unstack())(model)
    np.testing.assert_allclose(first.weight, 1.0)
    np.testing.assert_allclose(second.weight, 3.0)
    np.testing.assert_allclose(second.bias, 6.0)


def test_frozen_means_stay_frozen_and_their_scales_match_them(getkey):
    layer = nn.freeze(nn.BayesianLinear(2, 2, key=getkey()), lambda layer: layer.weight_mean)
    mean, scales = nn.posterior_mean(layer), posterior_scales(layer)
    trained = eqx.filter(mean, eqx.is_inexact_array)
    assert trained.weight is None
    assert trained.bias is not None
    assert jax.tree.structure(scales) == jax.tree.structure(mean)


def test_model_is_rebuilt_from_its_parts(network, model):
    estimator = "flipout"
    rebuilt = bayesian_from_parts(network, posterior_scales(model), estimator)
    where = lambda network: (network["first"], network["second"], network["stack"])
    expected = nn.to_bayesian(network, where, estimator=estimator)
    assert jax.tree.structure(rebuilt) == jax.tree.structure(expected)
    arrays = (jax.tree.leaves(eqx.filter(each, eqx.is_array)) for each in (rebuilt, expected))
    for found, each in zip(*arrays, strict=True):
        np.testing.assert_allclose(found, each, rtol=1e-5)


def test_layer_with_a_missing_scale_stays_plain(getkey):
    network = [nn.Linear(2, 2, key=getkey()), nn.Linear(2, 2, key=getkey())]
    scales = jax.tree.map(jnp.ones_like, network)
    scales[0] = eqx.tree_at(lambda layer: layer.bias, scales[0], None)
    rebuilt = bayesian_from_parts(network, scales, "local")
    assert [type(layer) for layer in rebuilt] == [nn.Linear, nn.BayesianLinear]
    covered = layers_with_estimators(network, scales)
    assert jax.tree.leaves(covered) == [False, False, True, True]


def test_complex_layers_stay_plain(getkey):
    network = nn.Linear(2, 2, dtype=jnp.complex64, key=getkey())
    scales = jax.tree.map(lambda leaf: jnp.ones(leaf.shape), network)
    assert bayesian_from_parts(network, scales, "local") == network


def test_layer_of_a_user_without_the_method_is_named_with_its_path(getkey):
    model = {"a": [nn.BayesianLinear(2, 2, key=getkey()), Shift(jnp.array(1.0))]}
    with pytest.raises(
        TypeError,
        match=r"^Shift at model\['a'\]\[1\] has no method `mean_layer`, which .*Define it",
    ):
        nn.posterior_mean(model)


@pytest.mark.parametrize(("layer", "other"), [("linear", "conv"), ("conv", "linear")])
def test_parts_of_different_kinds_are_refused(layer, other, getkey):
    layer, other = (LAYERS[name](key=getkey()) for name in (layer, other))
    name = "Linear" if isinstance(layer, nn.BayesianLinear) else "Conv"
    with pytest.raises(TypeError, match=rf"^mean must be an nn\.{name}, got a "):
        type(layer).from_parts(other.mean_layer(), layer.posterior_scales())
    with pytest.raises(TypeError, match=rf"^scales must be an nn\.{name}, got a "):
        type(layer).from_parts(layer.mean_layer(), other.posterior_scales())


def test_parts_that_do_not_fit_together_are_refused_with_their_paths(getkey):
    mean = nn.Linear(2, 3, key=getkey())
    scales = [eqx.tree_at(lambda layer: layer.weight, mean, jnp.ones((2, 3)))]
    message = (
        r"^Expected scales\[0\]\.weight to have the shape of network\[0\]\.weight, "
        r"\(3, 2\); got \(2, 3\)\.$"
    )
    with pytest.raises(ValueError, match=message):
        bayesian_from_parts([mean], scales, "local")
    with pytest.raises(ValueError, match=r"There is a scale at scales\['b'\], but no array"):
        bayesian_from_parts({"a": mean}, {"b": jnp.ones(2)}, "local")
    message = r"scales\.bias to be like mean\.bias, shape \(3,\); got None\.$"
    with pytest.raises(ValueError, match=message):
        nn.BayesianLinear.from_parts(mean, nn.Linear(2, 3, use_bias=False, key=getkey()))
