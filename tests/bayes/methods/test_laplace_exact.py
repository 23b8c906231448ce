"""Laplace is exact where the posterior is normal."""

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import optax
import pytest
from scipy import stats

from eqxlike import bayes, nn
from tests.bayes.methods.laplace import LINEAR, NEW, around, covariance_of, linear


@pytest.fixture(autouse=True, scope="module")
def double_precision():
    with jax.enable_x64(True):
        yield


def test_posterior_of_linear_regression_is_exact():
    method = bayes.Laplace(steps=30, optimiser=optax.lbfgs())
    found = bayes.infer(LINEAR.target, method, key=jr.key(1), progress=False).found
    np.testing.assert_allclose(found.mode, LINEAR.mean, rtol=1e-8)
    np.testing.assert_allclose(covariance_of(found.normal, 3), LINEAR.covariance, rtol=1e-8)


@pytest.mark.parametrize("num_samples", [2, 7, 100])
def test_predictions_of_linear_regression_are_exact(num_samples):
    prediction = bayes.predict(linear(), NEW, key=jr.key(2), num_samples=num_samples)
    assert isinstance(prediction, bayes.Mixture)
    mean, variance = LINEAR.predictive(NEW)
    np.testing.assert_allclose(prediction.mean, mean, rtol=1e-8)
    np.testing.assert_allclose(prediction.variance, variance, rtol=1e-8)


def test_quantiles_of_linear_regression_are_nearly_exact():
    prediction = bayes.predict(linear(), NEW, key=jr.key(2), num_samples=200)
    assert isinstance(prediction, bayes.Mixture)
    mean, variance = LINEAR.predictive(NEW)
    wanted = stats.norm(mean, np.sqrt(variance)).ppf(0.95)
    np.testing.assert_allclose(prediction.quantile(0.95), wanted, rtol=1e-3)


def test_evidence_of_linear_regression_is_exact():
    np.testing.assert_allclose(linear().log_evidence, LINEAR.log_evidence, rtol=1e-10)


def test_several_targets_have_the_exact_variances():
    model = nn.Linear(2, 2, key=jr.key(0), dtype=jnp.float64)
    targets = np.stack([LINEAR.y, 3.0 * LINEAR.x[:, 0]], axis=1)
    likelihood = bayes.Gaussian(LINEAR.noise)
    target = bayes.Posterior(model, bayes.normal(0.0, 1.0), likelihood, (LINEAR.x, targets))
    prediction = bayes.predict(around(target), NEW, key=jr.key(2), num_samples=5)
    assert isinstance(prediction, bayes.Mixture)
    _, variance = LINEAR.predictive(NEW)
    # Both have the same inputs and the same noise.
    expected = np.stack([variance, variance], axis=1)
    np.testing.assert_allclose(prediction.variance, expected, rtol=1e-8)
