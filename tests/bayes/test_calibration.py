import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
import scipy.stats
import sklearn.calibration
import sklearn.metrics

from eqxlike import bayes


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
    np.testing.assert_allclose(bayes.root_mean_squared_error(y, mean), expected, rtol=1e-5)


def test_gaussian_nll_is_that_of_scipy(regression):
    y, mean, scale = map(np.asarray, regression)
    expected = -scipy.stats.norm(mean, scale).logpdf(y).mean()
    np.testing.assert_allclose(bayes.gaussian_nll(*regression), expected, rtol=1e-5)


def test_coverage_counts_both_ends_in():
    y = jnp.array([0.0, 1.0, 2.0, 2.5, -1.0])
    assert bayes.interval_coverage(y, jnp.zeros(5), jnp.full(5, 2.0)) == np.float32(0.6)


def test_accuracy_and_nll_are_those_of_sklearn(predictions):
    probabilities, labels = predictions
    expected = sklearn.metrics.accuracy_score(labels, probabilities.argmax(-1))
    np.testing.assert_allclose(bayes.accuracy(probabilities, labels), expected, rtol=1e-6)
    exact = np.asarray(probabilities, np.float64)
    expected = sklearn.metrics.log_loss(labels, exact / exact.sum(-1, keepdims=True))
    value = bayes.categorical_nll(jnp.log(probabilities), labels)
    np.testing.assert_allclose(value, expected, rtol=1e-5)


@pytest.mark.parametrize("num_bins", [1, 5, 15])
def test_bins_are_those_of_sklearn(num_bins, predictions):
    probabilities, labels = predictions
    bins = bayes.calibration_bins(probabilities, labels, num_bins)
    accuracy, confidence = sklearn.calibration.calibration_curve(
        np.asarray(probabilities.argmax(-1) == labels), probabilities.max(-1), n_bins=num_bins
    )
    is_filled = np.asarray(bins.count > 0)
    np.testing.assert_allclose(bins.accuracy[is_filled], accuracy, rtol=1e-5)
    np.testing.assert_allclose(bins.confidence[is_filled], confidence, rtol=1e-5)
    assert bins.count.sum() == 500
    assert np.isnan(bins.accuracy[~is_filled]).all()


@pytest.mark.parametrize("num_bins", [1, 5, 15])
def test_ece_is_the_written_out_sum(num_bins, predictions):
    probabilities, labels = map(np.asarray, predictions)
    confidence, is_right = probabilities.max(-1), probabilities.argmax(-1) == labels
    expected = 0
    for m in range(num_bins):
        inside = (confidence > m / num_bins) & (confidence <= (m + 1) / num_bins)
        if inside.any():
            gap = abs(is_right[inside].mean() - confidence[inside].mean())
            expected += inside.mean() * gap
    value = bayes.expected_calibration_error(*predictions, num_bins)
    np.testing.assert_allclose(value, expected, rtol=1e-4)


def test_ece_of_labels_drawn_from_the_probabilities_is_small(getkey):
    logits = 2 * jr.normal(getkey(), (20_000, 4))
    labels = jr.categorical(getkey(), logits)
    probabilities = jax.nn.softmax(logits, axis=-1)
    assert bayes.expected_calibration_error(probabilities, labels) < 0.02
    assert bayes.expected_calibration_error(jax.nn.softmax(4 * logits, axis=-1), labels) > 0.1


def test_certainty_falls_in_the_last_bin_and_none_in_the_first():
    probabilities = jnp.array([[1.0, 0.0], [0.0, 0.0]])
    bins = bayes.calibration_bins(probabilities, jnp.array([0, 1]), 4)
    assert bins.count.tolist() == [1, 0, 0, 1]


def test_all_run_under_jit(predictions, regression):
    y, mean, scale = regression
    np.testing.assert_allclose(
        jax.jit(bayes.expected_calibration_error)(*predictions),
        bayes.expected_calibration_error(*predictions),
        rtol=1e-5,
    )
    np.testing.assert_allclose(
        jax.jit(bayes.interval_coverage)(y, mean - scale, mean + scale),
        bayes.interval_coverage(y, mean - scale, mean + scale),
        rtol=1e-6,
    )


def test_numpy_arrays_are_taken(predictions, regression):
    expected = bayes.expected_calibration_error(*predictions)
    value = bayes.expected_calibration_error(*map(np.asarray, predictions))
    np.testing.assert_array_equal(value, expected)
    y, mean, _ = map(np.asarray, regression)
    assert bayes.root_mean_squared_error(y, mean).shape == ()


@pytest.mark.parametrize(
    "function", [bayes.accuracy, bayes.categorical_nll, bayes.expected_calibration_error]
)
def test_wrong_shapes_are_refused(function):
    with pytest.raises(ValueError, match=r"of shape \(N,\), got \(5, 3\) and \(4,\)"):
        function(jnp.ones((5, 3)), jnp.zeros(4, jnp.int32))
    with pytest.raises(ValueError, match="integer labels, got dtype float32"):
        function(jnp.ones((5, 3)), jnp.zeros(5))


def test_shapes_that_would_broadcast_are_refused():
    with pytest.raises(ValueError, match=r"one shape, got y \(5,\), prediction \(5, 1\)"):
        bayes.root_mean_squared_error(jnp.zeros(5), jnp.zeros((5, 1)))


@pytest.mark.parametrize("num_bins", [0, 2.5])
def test_wrong_number_of_bins_is_refused(num_bins, predictions):
    with pytest.raises(ValueError, match=f"num_bins must be an integer of .* 1, got {num_bins}"):
        bayes.calibration_bins(*predictions, num_bins=num_bins)
