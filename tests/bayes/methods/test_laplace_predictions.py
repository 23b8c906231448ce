"""What Laplace predicts, and its evidence, beside integrals."""

import functools

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from scipy import integrate, optimize, stats
from scipy.special import expit

import eqxlike as eqx
from eqxlike import bayes
from tests.bayes.methods.laplace import (
    NEW,
    around,
    classes,
    covariance_of,
    jacobian_by_hand,
    precision_by_hand,
    predicting,
    small,
)


@pytest.fixture(autouse=True, scope="module")
def double_precision():
    with jax.enable_x64(True):
        yield


def test_linearised_logits_have_the_dense_mean_and_covariance():
    posterior = classes()
    prediction = bayes.predict(posterior, NEW, key=jr.key(2), num_samples=8)
    assert isinstance(prediction, bayes.CategoricalMixture)
    logits = np.asarray(prediction.logits)
    means = jax.vmap(posterior.target.network)(NEW)
    np.testing.assert_allclose(logits.mean(axis=0), means, rtol=1e-6)
    jacobian = jacobian_by_hand(posterior, NEW)
    inverse = np.linalg.inv(precision_by_hand(posterior))
    wanted = np.einsum("nci,ij,ndj->ncd", jacobian, inverse, jacobian)
    centred = logits - logits.mean(axis=0)
    found = np.einsum("snc,snd->ncd", centred, centred) / len(logits)
    np.testing.assert_allclose(found, wanted, rtol=1e-6)


def test_few_draws_of_several_logits_are_plain_ones():
    prediction = bayes.predict(classes(), NEW, key=jr.key(2), num_samples=1)
    assert isinstance(prediction, bayes.CategoricalMixture)
    assert np.all(np.isfinite(prediction.logits))


def test_probit_divides_logits_by_their_spread():
    posterior = predicting(classes(), "probit")
    jacobian = jacobian_by_hand(posterior, NEW)
    inverse = np.linalg.inv(precision_by_hand(posterior))
    variance = np.einsum("nci,ij,ncj->nc", jacobian, inverse, jacobian)
    wanted = jax.vmap(posterior.target.network)(NEW) / np.sqrt(1 + np.pi / 8 * variance)
    prediction = bayes.predict(posterior, NEW, key=jr.key(2), num_samples=2)
    assert isinstance(prediction, bayes.CategoricalMixture)
    expected = np.broadcast_to(wanted, (2, *wanted.shape))
    np.testing.assert_allclose(prediction.logits, expected, rtol=1e-6)


class Slope(eqx.Module):
    weight: jax.Array

    def __call__(self, x):
        return self.weight * x[0]


SLOPES = np.random.default_rng(0).normal(size=(20, 1))
IS_ONE = np.random.default_rng(1).uniform(size=20) < expit(1.5 * SLOPES[:, 0])


def slope_density(weight):
    """One parameter with two classes: everything can be integrated."""
    logits = np.where(IS_ONE, 1, -1) * weight * SLOPES[:, 0]
    return np.exp(np.log(expit(logits)).sum() + stats.norm.logpdf(weight, 0, 2))


@functools.cache
def slope():
    mode = optimize.fmin(lambda weight: -np.log(slope_density(weight)), 1.0, ftol=1e-12, disp=0)
    data = (SLOPES, IS_ONE.astype(int))
    return around(
        bayes.Posterior(
            Slope(jnp.asarray(mode[0])), bayes.normal(0.0, 2.0), bayes.Bernoulli(), data
        )
    )


def test_evidence_of_two_classes_is_near_the_integral():
    integral = integrate.quad(slope_density, -20, 20)[0]
    np.testing.assert_allclose(slope().log_evidence, np.log(integral), atol=0.05)


@pytest.mark.parametrize(("predictive", "atol"), [("linearised", 1e-3), ("probit", 0.02)])
def test_probabilities_of_two_classes_are_integrals(predictive, atol):
    found = slope().found
    spread = float(covariance_of(found.normal, 1)[0, 0]) ** 0.5
    mean = float(found.mode[0])
    new = np.array([[-2.0], [0.3], [4.0]])
    wanted = [
        integrate.quad(lambda w, x=x: expit(w * x) * stats.norm.pdf(w, mean, spread), -15, 20)[0]
        for x in new[:, 0]
    ]
    prediction = bayes.predict(predicting(slope(), predictive), new, key=jr.key(0), num_samples=200)
    assert isinstance(prediction, bayes.CategoricalMixture)
    np.testing.assert_allclose(prediction.probabilities[:, 1], wanted, atol=atol)


def test_sampled_networks_are_those_of_the_draws():
    posterior = predicting(small(), "sampled")
    prediction = bayes.predict(posterior, NEW, key=jr.key(2), num_samples=3)
    assert isinstance(prediction, bayes.Mixture)
    samples = posterior.samples(3, key=jr.split(jr.key(2))[0])
    wanted = jax.vmap(lambda sample: jax.vmap(posterior.model(sample))(NEW))(samples)
    np.testing.assert_allclose(prediction.components.mean, wanted, rtol=1e-10)
