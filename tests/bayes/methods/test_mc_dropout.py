"""Dropout in predictions, and models with dropout in a posterior."""

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest

import eqxlike as eqx
from eqxlike import bayes, nn
from tests.bayes.methods.cases import LinearModel, X, Y

LINEAR = LinearModel()


@pytest.fixture(autouse=True, scope="module")
def double_precision():
    with jax.enable_x64(True):
        yield


def linear():
    return nn.Linear(2, "scalar", key=jr.key(0), dtype=jnp.float64)


def target(model, data=(X, Y)):
    return bayes.Posterior(model, bayes.normal(), bayes.Gaussian(0.5), data)


def run(model, method=None, **kwargs):
    method = bayes.MCDropout(steps=1) if method is None else method
    return bayes.infer(target(model, **kwargs), method, key=jr.key(1), progress=False)


def test_the_density_of_a_model_with_dropout_is_that_without():
    layers = nn.Sequential([nn.Dropout(0.5), linear()]), nn.Sequential([nn.Identity(), linear()])
    found, expected = (
        float(each.log_density(each.initial(key=jr.key(0)))) for each in map(target, layers)
    )
    assert found == expected


def test_training_is_with_dropout():
    # Of a linear model, dropout of inputs is a ridge (Wager, Wang and Liang, 2013).
    rate = 0.3
    design = LINEAR.design(LINEAR.x)
    ridge = rate / (1 - rate) * np.diag(np.sum(design**2, axis=0) * [1, 1, 0]) / LINEAR.noise**2
    expected = np.linalg.solve(LINEAR.precision + ridge, design.T @ LINEAR.y / LINEAR.noise**2)
    posterior = run(
        nn.Sequential([nn.Dropout(rate), linear()]),
        bayes.MCDropout(steps=4000),
        data=(LINEAR.x, LINEAR.y),
    )
    sample = posterior.samples(1, key=jr.key(2)).model[1]
    found = np.concatenate([sample.weight.reshape(-1), sample.bias.reshape(-1)])
    np.testing.assert_allclose(found, expected, atol=0.05)
    assert np.max(np.abs(expected - LINEAR.mean)) > 0.3


class Masked(eqx.Module):
    """One number for each input: how many hidden units a mask leaves."""

    scale: jax.Array
    dropout: nn.Dropout

    def __call__(self, x, *, key=None):
        return jnp.sum(self.dropout(self.scale, key=key)) + 0 * jnp.sum(x)


def test_a_draw_has_one_mask_for_all_inputs_and_another_than_the_next_draw():
    posterior = run(Masked(jnp.ones(200), nn.Dropout(0.5)))
    prediction = bayes.predict(posterior, X, key=jr.key(2), num_samples=8)
    assert isinstance(prediction, bayes.Mixture)
    outputs = prediction.components.mean
    np.testing.assert_array_equal(outputs, np.broadcast_to(outputs[:, :1], outputs.shape))
    assert len(set(np.asarray(outputs[:, 0]))) > 4


def test_a_draw_without_noise_is_the_network_without_dropout():
    model = nn.Sequential([nn.Dropout(0.5), linear()])
    posterior = run(model)
    sample = jax.tree.map(lambda each: each[0], posterior.samples(1, key=jr.key(2)))
    assert sample.noise is not None
    plain = bayes.Unknowns(sample.model, sample.likelihood, sample.prior)
    weight, bias = sample.model[1].weight, sample.model[1].bias
    found, expected = posterior.model(plain)(X[0]), jnp.sum(weight @ X[0]) + jnp.sum(bias)
    np.testing.assert_allclose(found, expected, rtol=1e-12)


@pytest.mark.parametrize("model", ["none", "rate 0"])
def test_a_model_without_dropout_is_an_error(model):
    layers = [linear()] if model == "none" else [nn.Dropout(0.0), linear()]
    with pytest.raises(ValueError, match=r"Sequential has no dropout. Add `nn.Dropout\(p=0.1\)`"):
        run(nn.Sequential(layers))


class WithoutKey(eqx.Module):
    layers: nn.Sequential

    def __call__(self, x):
        return self.layers(x)


class KeyGoesNowhere(WithoutKey):
    def __call__(self, x, *, key=None):
        return self.layers(x)


def test_a_model_that_takes_no_key_is_an_error():
    model = WithoutKey(nn.Sequential([nn.Dropout(0.5), linear()]))
    with pytest.raises(ValueError, match=r"WithoutKey takes no `key`. Write `def __call__"):
        run(model)


def test_a_model_that_passes_no_key_on_is_an_error():
    model = KeyGoesNowhere(nn.Sequential([nn.Dropout(0.5), linear()]))
    with pytest.raises(ValueError, match="`key` of KeyGoesNowhere does not reach its dropout"):
        run(model)
