import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import numpyro.distributions as dist
import pytest

from eqxlike import bayes

NUM_SPLITS = 10_000


def normal(mean, scale=1.0):
    return bayes.Mixture(dist.Normal(mean[None], scale))


def categorical(probabilities):
    return bayes.CategoricalMixture(jnp.log(probabilities)[None])


def check_coverage(is_covered, size, level):
    """By the law of split conformal prediction, within four standard errors of so many splits."""
    error = 4 * np.sqrt(level * (1 - level) / NUM_SPLITS)
    assert level - error < np.mean(is_covered) < level + 1 / (size + 1) + error


@pytest.mark.parametrize(("size", "level"), [(20, 0.9), (9, 0.55)])
@pytest.mark.parametrize("score", ["normalised", "quantile"])
def test_intervals_of_a_wrong_model_cover_as_promised(score, size, level, getkey):
    # Skewed, of a scale that depends on x, and predicted as neither.
    x = jr.normal(getkey(), (NUM_SPLITS, size + 1))
    y = x + jnp.exp(x / 2 + jr.normal(getkey(), x.shape))

    @jax.jit
    @jax.vmap
    def covers(x, y):
        calibration, test = normal(x[:-1], 0.1), normal(x[-1:], 0.1)
        intervals = bayes.conformal_intervals(calibration, y[:-1], level=level, score=score)
        lower, upper = intervals(test)
        return (lower[0] <= y[-1]) & (y[-1] <= upper[0])

    check_coverage(covers(x, y), size, level)


@pytest.mark.parametrize(
    ("score", "is_randomised"), [("probability", False), ("adaptive", False), ("adaptive", True)]
)
def test_sets_of_a_wrong_model_cover_as_promised(score, is_randomised, getkey):
    size, level = 20, 0.8
    logits = jr.normal(getkey(), (NUM_SPLITS, size + 1, 5))
    labels = jr.categorical(getkey(), 0.5 * logits)

    @jax.jit
    @jax.vmap
    def covers(logits, labels, key):
        keys = list(jr.split(key)) if is_randomised else [None, None]
        calibration = bayes.CategoricalMixture(3 * logits[None, :-1])
        sets = bayes.conformal_sets(calibration, labels[:-1], level=level, score=score, key=keys[0])
        return sets(bayes.CategoricalMixture(3 * logits[None, -1:]), key=keys[1])[0, labels[-1]]

    is_covered = covers(logits, labels, jr.split(getkey(), NUM_SPLITS))
    check_coverage(is_covered, size, level)


def test_normalised_intervals_are_wider_where_the_model_is_less_certain():
    y = jnp.arange(1.0, 10.0)
    intervals = bayes.conformal_intervals(normal(jnp.zeros(9), 2.0), y, level=0.8)
    # The eighth smallest of nine scores, 8 / 2.
    lower, upper = intervals(normal(jnp.zeros(2), jnp.array([[1.0, 3.0]])))
    np.testing.assert_allclose(lower, [-4, -12], rtol=1e-6)
    np.testing.assert_allclose(upper, [4, 12], rtol=1e-6)


def test_quantile_intervals_are_moved_by_one_distance():
    calibration = normal(jnp.zeros(9), 1.0)
    ends = calibration.interval(0.8)[1][0]
    intervals = bayes.conformal_intervals(
        calibration, ends + jnp.arange(9.0), level=0.8, score="quantile"
    )
    test = normal(jnp.array([5.0]), 3.0)
    np.testing.assert_allclose(intervals(test)[0], test.interval(0.8)[0] - 7, rtol=1e-5)
    np.testing.assert_allclose(intervals(test)[1], test.interval(0.8)[1] + 7, rtol=1e-5)


def test_quantile_intervals_that_shrink_to_less_than_nothing_are_a_point():
    intervals = bayes.conformal_intervals(
        normal(jnp.zeros(9), 10.0), jnp.zeros(9), level=0.8, score="quantile"
    )
    lower, upper = intervals(normal(jnp.array([5.0]), 0.1))
    np.testing.assert_allclose(lower, 5, rtol=1e-5)
    np.testing.assert_allclose(upper, 5, rtol=1e-5)


def test_quantile_intervals_serve_what_has_no_variance(getkey):
    y = jr.cauchy(getkey(), (50,))
    heavy = bayes.Mixture(dist.Cauchy(jnp.zeros((1, 50)), 1.0))
    intervals = bayes.conformal_intervals(heavy, y, score="quantile")
    assert jnp.isfinite(jnp.asarray(intervals(heavy))).all()
    with pytest.raises(ValueError, match='50 of 50 are not finite; score="quantile" asks for no'):
        bayes.conformal_intervals(heavy, y, score="normalised")


def test_adaptive_sets_hold_the_classes_until_their_mass_is_above_the_quantile():
    calibration = categorical(jnp.tile(jnp.array([[0.5, 0.3, 0.2]]), (9, 1)))
    labels = jnp.array([0, 0, 0, 0, 1, 1, 1, 1, 2])
    # The eighth smallest of nine scores is that of the second class, 0.5.
    sets = bayes.conformal_sets(calibration, labels, level=0.8, score="adaptive")
    test = categorical(jnp.array([[0.05, 0.9, 0.05], [0.3, 0.3, 0.4], [0.1, 0.45, 0.45]]))
    expected = [[False, True, False], [True, False, True], [False, True, True]]
    np.testing.assert_array_equal(sets(test), expected)


def test_adaptive_sets_are_never_empty_but_for_a_key(getkey):
    logits = jr.normal(getkey(), (50, 3))
    calibration = bayes.CategoricalMixture(logits[None])
    labels = jnp.argmax(logits, axis=-1)
    sets = bayes.conformal_sets(calibration, labels, level=0.5, score="adaptive")
    np.testing.assert_array_equal(sets(calibration), jax.nn.one_hot(labels, 3, dtype=bool))
    key, other = jr.split(getkey())
    sets = bayes.conformal_sets(calibration, labels, level=0.5, score="adaptive", key=key)
    assert (sets(calibration, key=other).sum(axis=-1) == 0).any()


def test_randomised_sets_want_a_key_as_their_calibration_had(getkey):
    calibration, labels = categorical(jnp.full((9, 2), 0.5)), jnp.zeros(9, int)
    randomised = bayes.conformal_sets(
        calibration, labels, level=0.5, score="adaptive", key=getkey()
    )
    with pytest.raises(ValueError, match="expects a key, as at its calibration, got none"):
        randomised(calibration)
    plain = bayes.conformal_sets(calibration, labels, level=0.5, score="adaptive")
    with pytest.raises(ValueError, match="expects no key, as at its calibration, got one"):
        plain(calibration, key=getkey())
    with pytest.raises(ValueError, match='takes a key for score="adaptive" alone'):
        bayes.conformal_sets(calibration, labels, level=0.5, key=getkey())


@pytest.mark.parametrize(("level", "fewest"), [(0.9, 9), (0.95, 19), (0.55, 2), (0.99, 99)])
def test_too_few_examples_for_the_level_are_refused(level, fewest):
    def fit(size):
        return bayes.conformal_intervals(normal(jnp.zeros(size)), jnp.ones(size), level=level)

    assert fit(fewest).quantile == 1
    message = f"at least {fewest} calibration examples for level {level}, got {fewest - 1}"
    with pytest.raises(ValueError, match=message):
        fit(fewest - 1)


def test_rank_is_that_of_the_decimal_level():
    # As floats, 20 * 0.55 is 11.000000000000002, whose ceiling is 12.
    y = jnp.arange(19.0)
    intervals = bayes.conformal_intervals(normal(jnp.zeros(19)), y, level=0.55)
    np.testing.assert_allclose(intervals.quantile, 10, rtol=1e-6)


@pytest.mark.parametrize("level", [0, 1, 90])
def test_wrong_level_is_refused(level):
    with pytest.raises(ValueError, match=r"level must lie in \(0, 1\)"):
        bayes.conformal_intervals(normal(jnp.zeros(20)), jnp.zeros(20), level=level)


@pytest.mark.parametrize("shape", [(5, 1), (4,), ()])
def test_numbers_of_another_shape_are_refused(shape):
    with pytest.raises(ValueError, match=r"y of shape \(N,\) and a prediction of as many"):
        bayes.conformal_intervals(normal(jnp.zeros(5)), jnp.zeros(shape), level=0.5)


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        (jnp.zeros((5, 1), int), r"labels of shape \(N,\), got \(5, 3\) and \(5, 1\)"),
        (jnp.zeros(5), "integer labels, got dtype float32"),
        (jnp.arange(5), "labels from 0 to 2, got labels from 0 to 4"),
    ],
)
def test_wrong_labels_are_refused(labels, message):
    with pytest.raises(ValueError, match=message):
        bayes.conformal_sets(categorical(jnp.full((5, 3), 1 / 3)), labels, level=0.5)


def test_what_is_no_mixture_is_refused():
    message = r"sets expects .* a bayes\.CategoricalMixture, got .*Mixture\(logits\[None\]\)"
    with pytest.raises(TypeError, match=message):
        bayes.conformal_sets(jnp.ones((9, 2)), jnp.ones(9, int))
    message = r"intervals expects .* a bayes\.Mixture, got .*Normal\(mean\[None\], scale\)"
    with pytest.raises(TypeError, match=message):
        bayes.conformal_intervals(jnp.ones(9), jnp.ones(9))


def test_another_score_is_refused():
    with pytest.raises(ValueError, match='score must be "normalised" or "quantile", got \'mean\''):
        bayes.conformal_intervals(normal(jnp.zeros(5)), jnp.zeros(5), level=0.5, score="mean")
    mixture = categorical(jnp.full((5, 3), 1 / 3))
    with pytest.raises(ValueError, match='score must be "probability" or "adaptive", got \'aps\''):
        bayes.conformal_sets(mixture, jnp.zeros(5, int), level=0.5, score="aps")
