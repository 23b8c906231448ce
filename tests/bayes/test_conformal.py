import jax
import jax.random as jr
import numpy as np
import numpyro.distributions as dist
import pytest
from scipy import stats

import eqxlike as eqx
from eqxlike import bayes


def normal(mean, scale=1.0):
    return bayes.Mixture(dist.Normal(mean[None], scale))


def categorical(probabilities):
    return bayes.CategoricalMixture(np.log(probabilities)[None])


def test_randomised_sets_of_a_wrong_model_have_the_expected_coverage(getkey):
    size, level, num_splits = 20, 0.8, 5000
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(num_splits, size + 1, 5)).astype(np.float32)
    labels = np.argmax(0.5 * logits + rng.gumbel(size=logits.shape), axis=-1)

    @jax.jit
    @jax.vmap
    def covers(logits, labels, key):
        key, test_key = jr.split(key)
        calibration = bayes.CategoricalMixture(3 * logits[None, :-1])
        options = {"level": level, "score": "adaptive", "key": key}
        sets = bayes.conformal_sets(calibration, labels[:-1], **options)
        return sets(bayes.CategoricalMixture(3 * logits[None, -1:]), key=test_key)[0, labels[-1]]

    # The expected coverage of split conformal prediction, within four standard errors.
    found = np.mean(covers(logits, labels, jr.split(getkey(), num_splits)))
    error = 4 * np.sqrt(level * (1 - level) / num_splits)
    assert level - error < found < level + 1 / (size + 1) + error


@eqx.filter_jit
def ends(mean, scale, y, test_mean, test_scale, **options):
    """The ends of intervals that are calibrated on normal distributions."""
    intervals = bayes.conformal_intervals(normal(mean, scale), y, **options)
    return intervals(normal(test_mean, test_scale)), intervals.quantile


@eqx.filter_jit
def sets_of(logits, labels, test_logits, key=None, test_key=None, **options):
    sets = bayes.conformal_sets(bayes.CategoricalMixture(logits[None]), labels, key=key, **options)
    return sets(bayes.CategoricalMixture(test_logits[None]), key=test_key)


def test_normalised_intervals_are_wider_where_the_model_is_less_certain():
    test = np.zeros(2), np.array([1.0, 3.0])
    (lower, upper), _ = ends(np.zeros(9), np.full(9, 2.0), np.arange(1.0, 10.0), *test, level=0.8)
    # The quantile is the eighth smallest of nine scores, 8 / 2.
    np.testing.assert_allclose(lower, [-4, -12], rtol=1e-6)
    np.testing.assert_allclose(upper, [4, 12], rtol=1e-6)


def test_quantile_intervals_are_moved_by_one_distance():
    options = {"level": 0.8, "score": "quantile"}
    y = stats.norm.ppf(0.9) + np.arange(9.0)
    means, scales = np.array([5.0, 0.0]), np.array([3.0, 1.0])
    (lower, upper), _ = ends(np.zeros(9), np.ones(9), y, means, scales, **options)
    np.testing.assert_allclose(lower, stats.norm(means, scales).ppf(0.1) - 7, rtol=1e-5)
    np.testing.assert_allclose(upper, stats.norm(means, scales).ppf(0.9) + 7, rtol=1e-5)
    # An interval of negative length becomes a point.
    found, _ = ends(np.zeros(9), np.full(9, 10.0), np.zeros(9), means, scales / 10, **options)
    np.testing.assert_allclose(found, np.stack([means, means]), rtol=1e-5, atol=1e-5)


def test_adaptive_sets_contain_classes_until_their_mass_exceeds_the_quantile():
    labels = np.array([0, 0, 0, 0, 1, 1, 1, 1, 2])
    # The quantile is the eighth smallest of nine scores, the score 0.5 of the second class.
    calibration = np.tile(np.log([[0.5, 0.3, 0.2]]), (9, 1))
    test = np.log([[0.05, 0.9, 0.05], [0.3, 0.3, 0.4], [0.1, 0.45, 0.45]])
    expected = [[False, True, False], [True, False, True], [False, True, True]]
    found = sets_of(calibration, labels, test, level=0.8, score="adaptive")
    np.testing.assert_array_equal(found, expected)


def test_adaptive_sets_are_empty_only_with_a_key(getkey):
    logits = np.random.default_rng(0).normal(size=(50, 3))
    labels = np.argmax(logits, axis=-1)
    options = {"level": 0.5, "score": "adaptive"}
    found = sets_of(logits, labels, logits, **options)
    np.testing.assert_array_equal(found, np.eye(3, dtype=bool)[labels])
    found = sets_of(logits, labels, logits, getkey(), getkey(), **options)
    assert (np.sum(found, axis=-1) == 0).any()


def test_randomised_sets_need_a_key_if_their_calibration_had_one(getkey):
    def found(key, test_key, **options):
        args = np.zeros((9, 2)), np.zeros(9, int), np.zeros((9, 2))
        return eqx.filter_eval_shape(sets_of, *args, key, test_key, level=0.5, **options)

    with pytest.raises(ValueError, match="expects a key, got none"):
        found(getkey(), None, score="adaptive")
    with pytest.raises(ValueError, match="expects no key, got one"):
        found(None, getkey(), score="adaptive")
    with pytest.raises(ValueError, match='takes a key only with score="adaptive"'):
        found(getkey(), None)


def test_too_few_examples_for_the_level_are_refused():
    def quantile(size, level):
        place = np.zeros(1), np.ones(1)
        return ends(np.zeros(size), np.ones(size), np.ones(size), *place, level=level)[1]

    for level, fewest in [(0.9, 9), (0.55, 2)]:
        assert quantile(fewest, level) == 1
        message = f"at least {fewest} calibration examples for level {level}, got {fewest - 1}"
        with pytest.raises(ValueError, match=message):
            quantile(fewest - 1, level)


def test_rank_is_computed_with_the_decimal_level():
    # In floating point, 20 * 0.55 is 11.000000000000002, and its ceiling is 12.
    place = np.zeros(1), np.ones(1)
    _, quantile = ends(np.zeros(19), np.ones(19), np.arange(19.0), *place, level=0.55)
    np.testing.assert_allclose(quantile, 10, rtol=1e-6)


ZEROS, CAUCHY = np.zeros(5), bayes.Mixture(dist.Cauchy(np.zeros((1, 50)), 1.0))
SHAPES = r"y and prediction of the same shape \(N,\)"
WRONG_INTERVALS = [
    *[(normal(ZEROS), ZEROS, {"level": n}, r"level must lie in \(0, 1\)") for n in (0, 1, 90)],
    *[(normal(ZEROS), np.zeros(n), {"level": 0.5}, SHAPES) for n in ((5, 1), (4,), ())],
    (CAUCHY, np.zeros(50), {"score": "normalised"}, '50 of 50 are .*; score="quantile" needs no'),
    (normal(ZEROS), ZEROS, {"score": "mean"}, '"normalised" or "quantile", got \'mean\''),
]
WRONG_SETS = [
    (np.arange(5), {"level": 0.5}, "labels from 0 to 2, got labels from 0 to 4"),
    (np.zeros(5, int), {"score": "aps"}, 'must be "probability" or "adaptive", got \'aps\''),
]


def test_bad_input_is_refused():
    for prediction, y, options, words in WRONG_INTERVALS:
        with pytest.raises(ValueError, match=words):
            bayes.conformal_intervals(prediction, y, **options)
    for labels, options, words in WRONG_SETS:
        with pytest.raises(ValueError, match=words):
            bayes.conformal_sets(categorical(np.full((5, 3), 1 / 3)), labels, **options)
    message = r"sets expects a bayes\.CategoricalMixture, got .*Mixture\(logits\[None\]\)"
    with pytest.raises(TypeError, match=message):
        bayes.conformal_sets(np.ones((9, 2)), np.ones(9, int))
    message = r"intervals expects a bayes\.Mixture, got .*Normal\(mean\[None\], scale\)"
    with pytest.raises(TypeError, match=message):
        bayes.conformal_intervals(np.ones(9), np.ones(9))
