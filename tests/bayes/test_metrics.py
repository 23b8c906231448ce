import functools

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import pytest
import scipy.special
import scipy.stats
import sklearn.calibration
import sklearn.metrics

from eqxlike import bayes
from eqxlike.bayes import metrics
from eqxlike.train import metrics as train_metrics

RNG = np.random.default_rng(0)
PROBABILITIES = scipy.special.softmax(2 * RNG.normal(size=(500, 4)), axis=-1).astype(np.float32)
LABELS = RNG.integers(0, 4, 500, dtype=np.int32)
CONFIDENCE, IS_RIGHT = PROBABILITIES.max(-1), PROBABILITIES.argmax(-1) == LABELS
EXACT = PROBABILITIES / PROBABILITIES.sum(-1, keepdims=True, dtype=np.float64)


@functools.cache
def measured():
    """All metrics of classes, computed by one program."""

    @jax.jit
    def measures(probabilities, labels):
        pair = probabilities, labels
        return {
            "accuracy": metrics.accuracy(*pair),
            "brier": metrics.brier(*pair),
            "nll": metrics.nll(bayes.CategoricalMixture(jnp.log(probabilities)[None]), labels),
            "bins": {num: metrics.calibration_bins(*pair, num) for num in (1, 15)},
            "bins of mass": metrics.calibration_bins(*pair, 10, equal="mass"),
            "ece of mass": metrics.ece(*pair, 10, equal="mass"),
        }

    return jax.tree.map(np.asarray, measures(PROBABILITIES, LABELS))


def test_rmse_and_nll_of_one_component_equal_sklearn_and_scipy():
    y, mean = RNG.normal(size=(2, 50)).astype(np.float32)
    scale = np.exp(RNG.normal(size=50)).astype(np.float32)

    @jax.jit
    def both(y, mean, scale):
        mixture = bayes.Mixture(dist.Normal(mean[None], scale[None]))
        return metrics.rmse(mean, y), metrics.nll(mixture, y)

    rmse, nll = both(y, mean, scale)
    np.testing.assert_allclose(rmse, sklearn.metrics.root_mean_squared_error(y, mean), rtol=1e-5)
    np.testing.assert_allclose(nll, -scipy.stats.norm(mean, scale).logpdf(y).mean(), rtol=1e-5)


def test_nll_accepts_a_distribution_over_vectors():
    nll = jax.jit(lambda y: metrics.nll(dist.MultivariateNormal(jnp.zeros(3), jnp.eye(3)), y))
    exact = -scipy.stats.multivariate_normal(np.zeros(3)).logpdf(np.ones((2, 3))).mean()
    np.testing.assert_allclose(nll(np.ones((2, 3))), exact, rtol=1e-5)


def test_brier_score_accuracy_and_nll_equal_sklearn():
    expected = sklearn.metrics.brier_score_loss(LABELS, EXACT, scale_by_half=False)
    np.testing.assert_allclose(measured()["brier"], expected, rtol=1e-5)
    expected = sklearn.metrics.accuracy_score(LABELS, PROBABILITIES.argmax(-1))
    np.testing.assert_allclose(measured()["accuracy"], expected, rtol=1e-6)
    expected = sklearn.metrics.log_loss(LABELS, EXACT)
    np.testing.assert_allclose(measured()["nll"], expected, rtol=1e-5)


def test_bins_of_equal_mass_have_equal_counts():
    bins = measured()["bins of mass"]
    assert bins.count.tolist() == [50] * 10
    assert (np.diff(bins.confidence) > 0).all()
    assert ((bins.edges[:-1] <= bins.confidence) & (bins.confidence <= bins.edges[1:])).all()
    parts = np.split(np.argsort(CONFIDENCE), 10)
    gaps = [abs(IS_RIGHT[part].mean() - CONFIDENCE[part].mean()) for part in parts]
    np.testing.assert_allclose(measured()["ece of mass"], np.mean(gaps), rtol=1e-4)


def test_coverage_includes_both_ends_of_intervals():
    y = jnp.array([0.0, 1.0, 2.0, 2.5, -1.0])
    assert metrics.coverage(y, jnp.zeros(5), jnp.full(5, 2.0)) == np.float32(0.6)


@pytest.mark.parametrize("num_bins", [1, 15])
def test_bins_equal_sklearn(num_bins):
    bins = measured()["bins"][num_bins]
    accuracy, confidence = sklearn.calibration.calibration_curve(
        IS_RIGHT, CONFIDENCE, n_bins=num_bins
    )
    is_filled = bins.count > 0
    np.testing.assert_allclose(bins.accuracy[is_filled], accuracy, rtol=1e-5)
    np.testing.assert_allclose(bins.confidence[is_filled], confidence, rtol=1e-5)
    assert bins.count.sum() == 500
    assert np.isnan(bins.accuracy[~is_filled]).all()


def test_confidence_1_is_in_the_last_bin_and_0_in_the_first():
    probabilities = np.array([[1.0, 0.0], [0.0, 0.0]])
    count = jax.jit(lambda *pair: metrics.calibration_bins(*pair, 4).count)
    assert count(probabilities, np.array([0, 1])).tolist() == [1, 0, 0, 1]


def test_boolean_labels_are_two_classes():
    """All functions of labels treat arrays and lists of booleans as 0 and 1."""
    probabilities, labels = jnp.asarray(PROBABILITIES[:40, :2]), LABELS[:40] % 2
    mixture = bayes.CategoricalMixture(jnp.log(probabilities)[None])

    def measured(labels):
        return [
            metrics.accuracy(probabilities, labels),
            metrics.brier(probabilities, labels),
            metrics.ece(probabilities, labels),
            metrics.nll(mixture, labels),
            metrics.nll(dist.Categorical(logits=jnp.log(probabilities)), labels),
            bayes.temperature_scaling(mixture, labels).temperature,
            bayes.conformal_sets(mixture, labels).quantile,
            train_metrics.accuracy(probabilities, labels).value,
            train_metrics.perplexity(probabilities, labels).value,
        ]

    for booleans in (labels == 1, jnp.asarray(labels == 1), (labels == 1).tolist()):
        np.testing.assert_array_equal(measured(booleans), measured(labels))


def test_coverage_of_counts_is_a_fraction():
    with jax.numpy_dtype_promotion("standard"):
        assert metrics.coverage(jnp.arange(4), jnp.zeros(4), jnp.full(4, 1.5)) == 0.5


def test_scores_may_be_integers():
    assert metrics.accuracy(jnp.array([[3, 0], [0, 1]]), jnp.array([0, 0])) == 0.5
    assert metrics.rmse(jnp.array([100_000, 0]), jnp.array([0, 100_000])) == 100_000


ZEROS, MIXTURE = jnp.zeros(5), bayes.Mixture(dist.Normal(jnp.zeros((2, 5)), 1.0))
CLASSES = bayes.CategoricalMixture(jnp.zeros((2, 5, 3)))
WRONG_TYPES = [
    (lambda: metrics.nll([1.0], jnp.ones(1)), "with a method `log_prob`"),
    (lambda: metrics.nll(ZEROS, MIXTURE), r"rite `.*nll\(prediction, y\)`\.$"),
    (lambda: metrics.crps(MIXTURE, ZEROS), r"rite `.*crps\(y, prediction\)`\.$"),
    (lambda: metrics.rmse(MIXTURE, ZEROS), r"rite `.*rmse\(prediction\.mean, y\)`\.$"),
    (lambda: metrics.rmse(ZEROS, MIXTURE), r"rite `.*rmse\(prediction\.mean, y\)`\.$"),
    (lambda: metrics.coverage(ZEROS, MIXTURE, ZEROS), r"`.*\*prediction\.interval\(0\.9\)\)`\.$"),
    (lambda: metrics.sharpness(MIXTURE, ZEROS), r"`.*\*prediction\.interval\(0\.9\)\)`\.$"),
    (lambda: metrics.nll(CLASSES, np.array(["a"] * 5)), r"dtype <U1\. .* `np\.unique\(labels"),
    (
        lambda: metrics.accuracy(jnp.zeros((1, 2, 2)), np.array(["a", "b"])),
        r"dtype <U1\. .* `np\.unique\(labels",
    ),
    (
        lambda: metrics.crps(ZEROS, CLASSES),
        r"got a CategoricalMixture\. For classes use `brier",
    ),
]
WRONG_VALUES = [
    (
        lambda: metrics.nll(dist.Normal(ZEROS, 1.0), ZEROS[:, None]),
        r"y of shape \(5, 1\) and log densities of shape \(5, 5\)",
    ),
    (lambda: CLASSES.log_prob(ZEROS), r"got dtype float32\. Pass `y\.astype\(int\)`"),
    (lambda: metrics.ece(PROBABILITIES, LABELS, equal="size"), '"width" or "mass", got \'size\''),
    (lambda: metrics.calibration_bins(PROBABILITIES, LABELS, 0), "num_bins .* 1, got 0"),
    (lambda: metrics.rmse(ZEROS, ZEROS[:, None]), r"same shape, got prediction \(5,\), y \(5, 1\)"),
    (lambda: metrics.crps(ZEROS[:, None], MIXTURE), r"y of shape \(5, 1\) and batch shape \(5,\)"),
    (lambda: metrics.crps(ZEROS, ZEROS), r"draws of shape \(S, \*N\) .* got \(5,\) and \(5,\)"),
    (
        lambda: metrics.crps(jnp.ones(1), bayes.Mixture(dist.Poisson(jnp.ones((2, 1))))),
        "a mixture of Poisson is computed from draws: pass `key=`",
    ),
]


def test_error_of_bad_input_names_the_expected_input():
    for error, cases in ((TypeError, WRONG_TYPES), (ValueError, WRONG_VALUES)):
        for call, words in cases:
            with pytest.raises(error, match=words):
                call()


@pytest.mark.parametrize("measure", [metrics.accuracy, metrics.brier, metrics.ece])
def test_measures_of_classes_refuse_other_labels_and_mixtures(measure):
    for labels, words in [
        (jnp.zeros(4, int), r"of shape \(\*N\), got \(5, 3\) and \(4,\)"),
        (ZEROS, "integer labels, got dtype float32"),
        (jnp.arange(-1, 4), "labels from 0 to 2, got labels from -1 to 3"),
    ]:
        with pytest.raises(ValueError, match=words):
            measure(jnp.ones((5, 3)), labels)
    with pytest.raises(TypeError, match=r"got a CategoricalMixture: write `prediction\.prob"):
        measure(CLASSES, jnp.zeros(5, int))
