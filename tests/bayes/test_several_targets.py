"""Likelihoods of examples with several targets: a scale for each target, a class for each token."""

import pathlib

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import numpyro.distributions as dist
import optax
import pytest
import scipy.special
import sklearn.metrics

import eqxlike as eqx
from eqxlike import bayes, nn
from tests.bayes.methods.cases import run
from tests.bayes.methods.test_laplace import around

pytestmark = pytest.mark.usefixtures("double_precision")

RNG = np.random.default_rng(0)
X = RNG.normal(size=(60, 1))
SCALES = np.array([0.3, 1.0])
Y = X * np.array([1.0, -1.0]) + SCALES * RNG.normal(size=(60, 2))


def linear(scale, likelihood=bayes.Gaussian):
    model = nn.Linear(1, 2, use_bias=False, key=jr.key(0), dtype=jnp.float64)
    return bayes.Posterior(model, bayes.normal(), likelihood(scale), (X, Y))


def test_posterior_with_a_scale_for_each_target_equals_the_closed_form():
    precision = np.sum(X**2) / SCALES**2 + 1
    mean = (X.T @ Y)[0] / SCALES**2 / precision
    target = linear(SCALES)
    target = eqx.tree_at(lambda target: target.network.weight, target, jnp.asarray(mean[:, None]))
    prediction = bayes.predict(around(target), X[:5], key=jr.key(2))
    np.testing.assert_allclose(prediction.mean, X[:5] * mean, rtol=1e-5)
    np.testing.assert_allclose(prediction.epistemic, X[:5] ** 2 / precision, rtol=1e-5)
    np.testing.assert_allclose(prediction.aleatoric, np.broadcast_to(SCALES**2, (5, 2)), rtol=1e-6)
    assert np.isfinite(bayes.metrics.nll(prediction, Y[:5]))


ENSEMBLE = bayes.DeepEnsemble(steps=300, members=2, optimiser=optax.adam(0.1))


def test_unknown_scales_are_inferred_for_each_target(tmp_path: pathlib.Path):
    method = bayes.Laplace(steps=400, learning_rate=0.05, structure="kronecker", width=1.0)
    target = linear(dist.Gamma(2.0, 1.0).expand([2]).to_event(1))
    posterior = run(method, target)
    drawn = posterior.samples(2, key=jr.key(2)).likelihood["scale"]
    assert drawn.shape == (2, 2)
    prediction = bayes.predict(posterior, X[:1], key=jr.key(3))
    np.testing.assert_allclose(np.sqrt(prediction.aleatoric[0]), SCALES, rtol=0.25)
    posterior.save(tmp_path / "run")
    again = bayes.load(tmp_path / "run", target, method).samples(2, key=jr.key(2))
    np.testing.assert_array_equal(again.likelihood["scale"], drawn)


# --- classes of tokens ---

T, C = 2, 3


class Tokens(eqx.Module):
    """A linear map to the logits of `T` tokens."""

    linear: nn.Linear

    def __call__(self, x):
        return self.linear(x).reshape(T, C)


INPUTS = RNG.normal(size=(50, 2))
LABELS = RNG.integers(0, C, (50, T))


def tokens(labels=LABELS):
    model = Tokens(nn.Linear(2, T * C, key=jr.key(0), dtype=jnp.float64))
    return bayes.Posterior(model, bayes.normal(), bayes.Categorical(), (INPUTS, labels))


def test_density_of_an_example_is_the_sum_over_its_tokens():
    target = tokens()

    @jax.jit
    def both(key):
        first, second = jr.split(key)
        unknowns = target.initial(key=first)
        simulated = target.simulate(unknowns, key=second)
        logits = jax.vmap(target.model(unknowns))(INPUTS)
        return logits, target.log_likelihood(unknowns), simulated

    logits, found, simulated = both(jr.key(0))
    expected = scipy.special.log_softmax(logits, axis=-1)
    expected = np.take_along_axis(expected, LABELS[..., None], axis=-1)[..., 0].sum(axis=1)
    np.testing.assert_allclose(found, expected, rtol=1e-10)
    assert simulated.shape == LABELS.shape
    assert simulated.dtype == LABELS.dtype


def test_laplace_of_tokens_equals_laplace_of_each_token():
    """Tokens share no parameters, so the curvature has a block for each token."""
    target, parts = tokens(), []
    for index in range(T):
        whole, rows = target.network.linear, slice(index * C, (index + 1) * C)
        where = lambda layer: (layer.weight, layer.bias)
        part = nn.Linear(2, C, key=jr.key(0), dtype=jnp.float64)
        layer = eqx.tree_at(where, part, (whole.weight[rows], whole.bias[rows]))
        data = INPUTS, LABELS[:, index]
        parts.append(around(bayes.Posterior(layer, bayes.normal(), bayes.Categorical(), data)))
    whole = around(target)
    evidence = sum(float(part.log_evidence) for part in parts)
    np.testing.assert_allclose(whole.log_evidence, evidence, rtol=1e-6)
    together, alone = (
        bayes.predict(posterior, INPUTS[:5], key=jr.key(2), num_samples=2000)
        for posterior in (whole, parts[1])
    )
    np.testing.assert_allclose(together.probabilities[:, 1], alone.probabilities, atol=0.02)


def test_predictions_and_metrics_of_tokens_use_all_labels():
    prediction = bayes.predict(run(ENSEMBLE, tokens()), INPUTS, key=jr.key(2))
    assert isinstance(prediction, bayes.CategoricalMixture)
    probabilities = np.asarray(prediction.probabilities)
    assert probabilities.shape == (50, T, C)
    np.testing.assert_allclose(probabilities.sum(axis=-1), 1, rtol=1e-6)
    assert prediction.entropy.shape == prediction.log_prob(LABELS).shape == (50, T)
    flat, labels = probabilities.reshape(-1, C), LABELS.reshape(-1)
    for found, expected in [
        (bayes.metrics.nll(prediction, LABELS), sklearn.metrics.log_loss(labels, flat)),
        (
            bayes.metrics.accuracy(probabilities, LABELS),
            sklearn.metrics.accuracy_score(labels, flat.argmax(axis=1)),
        ),
        (
            bayes.metrics.brier(probabilities, LABELS),
            sklearn.metrics.brier_score_loss(labels, flat, scale_by_half=False),
        ),
        (bayes.metrics.ece(probabilities, LABELS), bayes.metrics.ece(flat, labels)),
    ]:
        np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_error_names_labels_of_another_shape():
    for labels, message in [
        (np.eye(C)[LABELS], r"shape \(2, 3\) and dtype float64\. Pass `y.argmax\(axis=-1\)`"),
        (LABELS.astype(float), r"integers of shape \(2,\) .* float64\. Pass `y.astype\(int\)`\."),
        (LABELS[..., None], r"shape \(2, 1\) and dtype int64\. Pass `y\[\.\.\., 0\]`\."),
        (LABELS[:, 0], r"integers of shape \(2,\) .*, the number of a class; got shape \(\) and"),
        (LABELS + 1, "expects targets of 0 to 2"),
    ]:
        with pytest.raises(ValueError, match=message):
            tokens(labels)


def test_list_of_scales_equals_an_array_of_scales():
    listed, array = bayes.Gaussian(scale=[0.3, 0.9]), bayes.Gaussian(scale=np.array([0.3, 0.9]))
    centre, y = jnp.zeros(2), jnp.array([1.0, -2.0])
    assert listed.log_prob(centre, {}, y) == array.log_prob(centre, {}, y)
    with pytest.raises(ValueError, match="scale"):
        bayes.Gaussian(scale=[0.3, -0.9])
