import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import pytest
import scipy.special
import scipy.stats
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from eqxlike import bayes

FLOATS = st.floats(-10, 10, width=32)
MEANS = hnp.arrays(np.float32, (5, 3), elements=FLOATS)
SCALES = hnp.arrays(np.float32, (5, 3), elements=st.floats(0.0625, 5, width=32))


def mixture_of(means, scales):
    return bayes.Mixture(dist.Normal(means, scales))


@jax.jit
def log_density(y, means, scales):
    return mixture_of(means, scales).log_prob(y)


@jax.jit
def cdf(y, means, scales):
    return mixture_of(means, scales).cdf(y)


@jax.jit
def moments(means, scales):
    mixture = mixture_of(means, scales)
    return mixture.mean, mixture.variance, mixture.epistemic


@jax.jit
def uncertainty(logits):
    mixture = bayes.CategoricalMixture(logits)
    return mixture.entropy, mixture.aleatoric, mixture.epistemic


@jax.jit
def quantile(probability, means, scales):
    return mixture_of(means, scales).quantile(probability)


@given(MEANS, SCALES, hnp.arrays(np.float32, (3,), elements=FLOATS))
def test_log_density_and_cdf_equal_scipy(means, scales, y):
    density = scipy.stats.norm(means, scales).pdf(y).mean(0)
    np.testing.assert_allclose(
        np.exp(log_density(y, means, scales)), density, rtol=1e-3, atol=1e-30
    )
    exact = scipy.stats.norm(means.astype(np.float64), scales).cdf(y).mean(0)
    np.testing.assert_allclose(cdf(y, means, scales), exact, rtol=1e-4, atol=1e-6)


def test_log_density_is_finite_where_the_density_underflows():
    value = log_density(np.array([100.0]), np.zeros((3, 1)), 1.0)
    np.testing.assert_allclose(value, scipy.stats.norm.logpdf(100), rtol=1e-5)


@given(MEANS, SCALES)
def test_moments_equal_moments_of_the_mixture(means, scales):
    mean, variance, epistemic = moments(means, scales)
    means, scales = means.astype(np.float64), scales.astype(np.float64)
    second = (means**2 + scales**2).mean(0)
    np.testing.assert_allclose(mean, means.mean(0), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(variance, second - means.mean(0) ** 2, rtol=1e-3, atol=1e-4)
    np.testing.assert_allclose(epistemic, means.var(0), rtol=1e-3, atol=1e-4)


@given(MEANS, SCALES, st.floats(0.01, 0.99))
def test_quantile_inverts_the_cdf(means, scales, probability):
    found = cdf(quantile(probability, means, scales), means, scales)
    np.testing.assert_allclose(found, probability, atol=1e-5)


def test_quantile_in_64_bit_mode_has_double_precision():
    with jax.enable_x64(True):
        found = quantile(0.975, np.zeros((2, 1)), 1.0)
        np.testing.assert_allclose(found, scipy.stats.norm.ppf(0.975), rtol=1e-13)


def test_integer_means_have_noninteger_quantiles():
    with jax.numpy_dtype_promotion("standard"):
        mixture = mixture_of(np.array([[0], [2]]), 1.0)
        np.testing.assert_allclose(mixture.cdf(mixture.quantile(0.9)), 0.9, atol=1e-5)


def test_cdf_of_a_nan_is_nan():
    assert np.isnan(mixture_of(jnp.zeros((2, 1)), 1.0).cdf(jnp.array([np.nan]))).all()


@pytest.mark.parametrize(
    ("components", "expected", "rtol"),
    [
        (dist.Poisson(np.array([[3.0, 100.0]], np.float32)), scipy.stats.poisson([3, 100]), 0),
        # The CDF is NaN below 0.
        (
            dist.NegativeBinomial2(np.full((2, 3), 3.0, np.float32), 2.0),
            scipy.stats.nbinom(2, 0.4),
            0,
        ),
        # The tails are so heavy that the mean does not exist.
        (
            dist.StudentT(1.0, np.array([[3.0, 100.0]], np.float32), 1.0),
            *(scipy.stats.t(1, [3, 100]), 1e-4),
        ),
    ],
)
def test_quantiles_equal_scipy(components, expected, rtol):
    quantile = jax.jit(lambda p: bayes.Mixture(components).quantile(p))
    for probability in (0.001, 0.05, 0.3, 0.5, 0.95):
        np.testing.assert_allclose(quantile(probability), expected.ppf(probability), rtol=rtol)


def test_probabilities_are_averaged_not_logits():
    logits = 5 * np.random.default_rng(0).normal(size=(6, 4, 3)).astype(np.float32)
    log_probabilities = bayes.CategoricalMixture(logits).log_probabilities
    expected = scipy.special.softmax(logits, axis=-1).mean(0)
    np.testing.assert_allclose(np.exp(log_probabilities), expected, rtol=1e-5)


def test_log_probabilities_stay_finite_where_probabilities_underflow():
    logits = jnp.array([[0.0, 500.0]])
    np.testing.assert_allclose(
        bayes.CategoricalMixture(logits[None]).log_probabilities[0], [-500, 0], atol=1e-4
    )


def test_uncertainty_equals_explicit_entropies():
    logits = np.random.default_rng(0).normal(size=(6, 4, 3)).astype(np.float32)
    probabilities = scipy.special.softmax(logits.astype(np.float64), axis=-1)
    total = scipy.stats.entropy(probabilities.mean(0), axis=-1)
    aleatoric = scipy.stats.entropy(probabilities, axis=-1).mean(0)
    found = uncertainty(logits)
    np.testing.assert_allclose(found[0], total, rtol=1e-5)
    np.testing.assert_allclose(found[1], aleatoric, rtol=1e-5)
    np.testing.assert_allclose(found[2], total - aleatoric, atol=1e-6)


def test_networks_that_agree_leave_no_epistemic_uncertainty():
    logits = np.broadcast_to(np.array([1.0, -200.0, 300.0], np.float32), (6, 4, 3))
    np.testing.assert_allclose(uncertainty(logits)[2], 0, atol=1e-6)


NORMALS, CLASSES = (
    mixture_of(jnp.zeros((2, 5)), 1.0),
    bayes.CategoricalMixture(jnp.zeros((2, 5, 3))),
)
SEVERAL = r"one probability, got shape \(2,\)\. .* `jax\.vmap"
WRONG_VALUES = [
    *[(NORMALS.interval, n, r"level must lie in \(0, 1\)") for n in (0, 1.0, -0.5, 90)],
    *[(NORMALS.quantile, n, r"must lie in \(0, 1\)") for n in (0, 1.0, -0.5, 90, np.float32(1.5))],
    (NORMALS.quantile, jnp.array([0.1, 0.9]), SEVERAL),
    *[(NORMALS.log_prob, jnp.zeros(n), r"log_prob .* \(5,\), got") for n in ((5, 1), (2, 5), ())],
    *[(NORMALS.cdf, jnp.zeros(n), r"cdf expects y .* \(5,\), got") for n in ((5, 1), (2, 5), ())],
    (CLASSES.log_prob, jnp.zeros((5, 1), int), r"y of the shape .* \(5,\), got \(5, 1\)"),
    (CLASSES.log_prob, jnp.arange(-1, 4), "labels from 0 to 2, got labels from"),
    (CLASSES.log_prob, jnp.arange(5) // 4 * 3, "labels from 0 to 2, got labels from 0 to 3"),
    (bayes.Mixture, dist.Normal(), r"got batch shape \(\) and event shape \(\)"),
    (bayes.Mixture, dist.Dirichlet(jnp.ones((2, 3))), r"shape \(2,\) and event shape \(3,\)"),
]


def test_bad_input_is_refused():
    for call, argument, words in WRONG_VALUES:
        with pytest.raises(ValueError, match=words):
            call(argument)
    with pytest.raises(TypeError, match="components must be a distribution"):
        bayes.Mixture(jnp.ones(3))
