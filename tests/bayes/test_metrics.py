import re

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import numpyro.distributions as dist
import pytest
import scipy.stats
import sklearn.calibration
import sklearn.metrics

from eqxlike import bayes
from eqxlike.bayes import metrics


@pytest.fixture
def predictions(getkey):
    probabilities = jax.nn.softmax(2 * jr.normal(getkey(), (500, 4)), axis=-1)
    return probabilities, jr.randint(getkey(), (500,), 0, 4)


@pytest.fixture
def regression(getkey):
    y, mean = jr.normal(getkey(), (2, 50))
    return y, mean, jnp.exp(jr.normal(getkey(), (50,)))


def test_rmse_is_that_of_sklearn(regression):
    y, mean, _ = regression
    expected = sklearn.metrics.root_mean_squared_error(y, mean)
    np.testing.assert_allclose(metrics.rmse(y, mean), expected, rtol=1e-5)


def test_nll_of_one_component_is_that_of_scipy(regression):
    y, mean, scale = map(np.asarray, regression)
    expected = -scipy.stats.norm(mean, scale).logpdf(y).mean()
    mixture = bayes.Mixture(dist.Normal(mean[None], scale[None]))
    np.testing.assert_allclose(metrics.nll(mixture, y), expected, rtol=1e-5)


def test_nll_is_of_what_has_a_density():
    with pytest.raises(TypeError, match="with a method `log_prob`"):
        metrics.nll([1.0], jnp.ones(1))


def test_measure_that_is_called_otherwise_says_how_to_call_it():
    mixture, y = bayes.Mixture(dist.Normal(jnp.zeros((2, 5)), 1.0)), jnp.zeros(5)
    for call, way_out in [
        (lambda: metrics.nll(y, mixture), "nll(prediction, y)"),
        (lambda: metrics.crps(mixture, y), "crps(y, prediction)"),
        (lambda: metrics.rmse(y, mixture), "rmse(y, prediction.mean)"),
        (lambda: metrics.rmse(mixture, y), "rmse(y, prediction.mean)"),
        (lambda: metrics.coverage(y, mixture, y), "*prediction.interval(0.9))"),
        (lambda: metrics.sharpness(mixture, y), "*prediction.interval(0.9))"),
    ]:
        with pytest.raises(TypeError, match=rf"rite `.*{re.escape(way_out)}`\.$"):
            call()


def test_measure_of_classes_asks_a_prediction_for_its_probabilities():
    mixture = bayes.CategoricalMixture(jnp.zeros((2, 5, 3)))
    for measure in (metrics.accuracy, metrics.brier, metrics.ece):
        with pytest.raises(TypeError, match=r"got a CategoricalMixture: write `prediction\.prob"):
            measure(mixture, jnp.zeros(5, int))


def test_nll_of_targets_that_would_broadcast_is_refused():
    with pytest.raises(ValueError, match=r"y has shape \(5, 1\), and its log density \(5, 5\)"):
        metrics.nll(dist.Normal(jnp.zeros(5), 1.0), jnp.zeros((5, 1)))


def test_nll_takes_a_distribution_over_vectors():
    nll = jax.jit(lambda y: metrics.nll(dist.MultivariateNormal(jnp.zeros(3), jnp.eye(3)), y))
    exact = -scipy.stats.multivariate_normal(np.zeros(3)).logpdf(np.ones((2, 3))).mean()
    np.testing.assert_allclose(nll(np.ones((2, 3))), exact, rtol=1e-5)


def test_brier_score_is_that_of_sklearn(predictions):
    probabilities, labels = predictions
    exact = np.asarray(probabilities, np.float64)
    expected = sklearn.metrics.brier_score_loss(
        labels, exact / exact.sum(-1, keepdims=True), scale_by_half=False
    )
    np.testing.assert_allclose(metrics.brier(probabilities, labels), expected, rtol=1e-5)


def test_bins_of_equal_mass_hold_as_many_each(predictions):
    bins = metrics.calibration_bins(*predictions, 10, equal="mass")
    assert bins.count.tolist() == [50] * 10
    assert (jnp.diff(bins.confidence) > 0).all()
    assert ((bins.edges[:-1] <= bins.confidence) & (bins.confidence <= bins.edges[1:])).all()


def test_ece_of_equal_mass_is_the_written_out_sum(predictions):
    probabilities, labels = map(np.asarray, predictions)
    confidence, is_right = probabilities.max(-1), probabilities.argmax(-1) == labels
    order = np.argsort(confidence)
    gaps = [abs(is_right[part].mean() - confidence[part].mean()) for part in np.split(order, 10)]
    found = metrics.ece(*predictions, 10, equal="mass")
    np.testing.assert_allclose(found, np.mean(gaps), rtol=1e-4)


def test_another_word_for_bins_is_refused(predictions):
    with pytest.raises(ValueError, match='equal must be "width" or "mass", got \'size\''):
        metrics.ece(*predictions, equal="size")


def test_coverage_counts_both_ends_in():
    y = jnp.array([0.0, 1.0, 2.0, 2.5, -1.0])
    assert metrics.coverage(y, jnp.zeros(5), jnp.full(5, 2.0)) == np.float32(0.6)


def test_accuracy_and_nll_are_those_of_sklearn(predictions):
    probabilities, labels = predictions
    expected = sklearn.metrics.accuracy_score(labels, probabilities.argmax(-1))
    np.testing.assert_allclose(metrics.accuracy(probabilities, labels), expected, rtol=1e-6)
    exact = np.asarray(probabilities, np.float64)
    expected = sklearn.metrics.log_loss(labels, exact / exact.sum(-1, keepdims=True))
    value = metrics.nll(bayes.CategoricalMixture(jnp.log(probabilities)[None]), labels)
    np.testing.assert_allclose(value, expected, rtol=1e-5)


@pytest.mark.parametrize("num_bins", [1, 15])
def test_bins_are_those_of_sklearn(num_bins, predictions):
    probabilities, labels = predictions
    bins = metrics.calibration_bins(probabilities, labels, num_bins)
    accuracy, confidence = sklearn.calibration.calibration_curve(
        np.asarray(probabilities.argmax(-1) == labels), probabilities.max(-1), n_bins=num_bins
    )
    is_filled = np.asarray(bins.count > 0)
    np.testing.assert_allclose(bins.accuracy[is_filled], accuracy, rtol=1e-5)
    np.testing.assert_allclose(bins.confidence[is_filled], confidence, rtol=1e-5)
    assert bins.count.sum() == 500
    assert np.isnan(bins.accuracy[~is_filled]).all()


@pytest.mark.parametrize("num_bins", [1, 15])
def test_ece_is_the_written_out_sum(num_bins, predictions):
    probabilities, labels = map(np.asarray, predictions)
    confidence, is_right = probabilities.max(-1), probabilities.argmax(-1) == labels
    expected = 0
    for m in range(num_bins):
        inside = (confidence > m / num_bins) & (confidence <= (m + 1) / num_bins)
        if inside.any():
            gap = abs(is_right[inside].mean() - confidence[inside].mean())
            expected += inside.mean() * gap
    value = metrics.ece(*predictions, num_bins)
    np.testing.assert_allclose(value, expected, rtol=1e-4)


def test_certainty_falls_in_the_last_bin_and_none_in_the_first():
    probabilities = jnp.array([[1.0, 0.0], [0.0, 0.0]])
    bins = metrics.calibration_bins(probabilities, jnp.array([0, 1]), 4)
    assert bins.count.tolist() == [1, 0, 0, 1]


def test_wrong_shapes_are_refused():
    for function in (metrics.accuracy, metrics.brier, metrics.ece):
        with pytest.raises(ValueError, match=r"of shape \(N,\), got \(5, 3\) and \(4,\)"):
            function(jnp.ones((5, 3)), jnp.zeros(4, jnp.int32))
        with pytest.raises(ValueError, match="integer labels, got dtype float32"):
            function(jnp.ones((5, 3)), jnp.zeros(5))


def test_shapes_that_would_broadcast_are_refused():
    with pytest.raises(ValueError, match=r"one shape, got y \(5,\), prediction \(5, 1\)"):
        metrics.rmse(jnp.zeros(5), jnp.zeros((5, 1)))


@pytest.mark.parametrize("num_bins", [0, 2.5])
def test_wrong_number_of_bins_is_refused(num_bins, predictions):
    with pytest.raises(ValueError, match=f"num_bins must be an integer of .* 1, got {num_bins}"):
        metrics.calibration_bins(*predictions, num_bins=num_bins)
