import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
import scipy.special
import scipy.stats
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from eqxlike import bayes, filter_jit, nn

FLOATS = st.floats(-10, 10, width=32)
MEANS = hnp.arrays(np.float32, (5, 3), elements=FLOATS)
SCALES = hnp.arrays(np.float32, (5, 3), elements=st.floats(0.0625, 5, width=32))


log_density = jax.jit(bayes.gaussian_mixture_log_density)
cdf = jax.jit(bayes.gaussian_mixture_cdf)
moments = jax.jit(bayes.gaussian_mixture_moments)
quantile = jax.jit(bayes.gaussian_mixture_quantile)


@given(MEANS, SCALES, hnp.arrays(np.float32, (3,), elements=FLOATS))
def test_log_density_and_cdf_are_those_of_scipy(means, scales, y):
    density = scipy.stats.norm(means, scales).pdf(y).mean(0)
    np.testing.assert_allclose(
        np.exp(log_density(y, means, scales)), density, rtol=1e-3, atol=1e-30
    )
    exact = scipy.stats.norm(means.astype(np.float64), scales).cdf(y).mean(0)
    np.testing.assert_allclose(cdf(y, means, scales), exact, rtol=1e-4, atol=1e-6)


def test_log_density_is_finite_where_the_density_underflows():
    value = bayes.gaussian_mixture_log_density(jnp.array([100.0]), jnp.zeros((3, 1)), 1.0)
    np.testing.assert_allclose(value, scipy.stats.norm.logpdf(100), rtol=1e-5)


@given(MEANS, SCALES)
def test_moments_are_those_of_the_mixture(means, scales):
    found = moments(means, scales)
    means, scales = means.astype(np.float64), scales.astype(np.float64)
    second = (means**2 + scales**2).mean(0)
    np.testing.assert_allclose(found.mean, means.mean(0), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(found.variance, second - means.mean(0) ** 2, rtol=1e-3, atol=1e-4)
    np.testing.assert_allclose(found.epistemic, means.var(0), rtol=1e-3, atol=1e-4)


@given(MEANS, SCALES, st.floats(0.01, 0.99))
def test_quantile_inverts_the_cdf(means, scales, probability):
    found = cdf(quantile(probability, means, scales), means, scales)
    np.testing.assert_allclose(found, probability, atol=1e-5)


@pytest.mark.parametrize("probability", [1e-4, 0.05, 0.5, 0.95, 0.9999])
def test_quantile_of_one_component_is_that_of_scipy(probability):
    means, scale = np.array([[-3.0, 0.0, 40.0]], np.float32), 2.5
    exact = scipy.stats.norm(means[0], scale).ppf(probability)
    np.testing.assert_allclose(quantile(probability, means, scale), exact, rtol=1e-4, atol=1e-5)


def test_quantile_in_64_bit_mode_has_its_digits():
    with jax.enable_x64(True):
        found = quantile(0.975, np.zeros((2, 1)), 1.0)
        np.testing.assert_allclose(found, scipy.stats.norm.ppf(0.975), rtol=1e-13)


@pytest.mark.parametrize("level", [0.5, 0.9])
def test_interval_holds_its_level_of_samples(level):
    generator = np.random.default_rng(0)
    means = generator.normal(0, 3, (7, 1)).astype(np.float32)
    scales = generator.lognormal(0, 1, (7, 1)).astype(np.float32)
    lower, upper = bayes.gaussian_mixture_interval(means, scales, level=level)
    index = generator.integers(7, size=20_000)
    y = generator.normal(means[index, 0], scales[index, 0])
    np.testing.assert_allclose((y < lower).mean(), (1 - level) / 2, atol=0.02)
    np.testing.assert_allclose((y > upper).mean(), (1 - level) / 2, atol=0.02)


@pytest.mark.parametrize("level", [0, 1, 90])
def test_wrong_level_is_refused(level):
    with pytest.raises(ValueError, match=r"level must lie in \(0, 1\)"):
        bayes.gaussian_mixture_interval(jnp.zeros((2, 1)), 1.0, level=level)


@pytest.mark.parametrize(
    "scales", [2.0, jnp.array(2.0), jnp.full((5, 1), 2.0), jnp.full((1, 3), 2)]
)
def test_scales_broadcast_axis_by_axis(scales):
    means, y = jnp.arange(15.0).reshape(5, 3), jnp.zeros(3)
    full = log_density(y, means, jnp.full((5, 3), 2.0))
    np.testing.assert_allclose(log_density(y, means, scales), full, rtol=1e-6)


def test_scales_of_another_rank_are_refused():
    with pytest.raises(ValueError, match=r"scales must have shape \(\) or as many axes as means"):
        bayes.gaussian_mixture_moments(jnp.zeros((5, 3)), jnp.ones(3))


def test_probabilities_are_averaged_not_logits(getkey):
    logits = np.asarray(5 * jr.normal(getkey(), (6, 4, 3)))
    log_probabilities = jax.jit(bayes.categorical_mixture_log_probabilities)(logits)
    expected = scipy.special.softmax(logits, axis=-1).mean(0)
    np.testing.assert_allclose(np.exp(log_probabilities), expected, rtol=1e-5)


def test_log_probabilities_stay_finite_where_probabilities_underflow():
    logits = jnp.array([[0.0, 500.0]])
    np.testing.assert_allclose(
        bayes.categorical_mixture_log_probabilities(logits), [-500, 0], atol=1e-4
    )


def test_uncertainty_is_that_of_written_out_entropies(getkey):
    logits = np.asarray(jr.normal(getkey(), (6, 4, 3)))
    probabilities = scipy.special.softmax(logits.astype(np.float64), axis=-1)
    total = scipy.stats.entropy(probabilities.mean(0), axis=-1)
    aleatoric = scipy.stats.entropy(probabilities, axis=-1).mean(0)
    parts = jax.jit(bayes.categorical_uncertainty)(logits)
    np.testing.assert_allclose(parts.total, total, rtol=1e-5)
    np.testing.assert_allclose(parts.aleatoric, aleatoric, rtol=1e-5)
    np.testing.assert_allclose(parts.epistemic, total - aleatoric, atol=1e-6)


def test_networks_that_agree_leave_no_epistemic_uncertainty():
    logits = jnp.broadcast_to(jnp.array([1.0, -200.0, 300.0]), (5, 1, 3))
    parts = jax.jit(bayes.categorical_uncertainty)(logits)
    np.testing.assert_allclose(parts.epistemic, 0, atol=1e-6)


def test_each_draw_is_one_network_applied_to_all_inputs(getkey):
    key = getkey()
    model = nn.BayesianMLP(2, 3, 8, 1, posterior_scale=1.0, key=getkey())
    x = np.concatenate([np.ones((4, 2), np.float32), np.zeros((1, 2), np.float32)])
    outputs = np.asarray(filter_jit(bayes.predict_samples)(model, x, key=key, num_samples=3))
    assert outputs.shape == (3, 5, 3)
    same = np.broadcast_to(outputs[:, :1], (3, 4, 3))
    np.testing.assert_allclose(outputs[:, :4], same, rtol=1e-5)
    network = filter_jit(nn.sample_posterior)(model, jr.split(jr.clone(key), 3)[2])
    np.testing.assert_allclose(outputs[2, 0], network(jnp.ones(2)), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("num_samples", [0, 2.5])
def test_number_of_draws_that_is_no_positive_integer_is_refused(num_samples, getkey):
    model = nn.BayesianLinear(2, 1, key=getkey())
    options = {"key": getkey(), "num_samples": num_samples}
    with pytest.raises(ValueError, match=f"num_samples must be .* at least 1, got {num_samples}"):
        bayes.predict_samples(model, jnp.ones((3, 2)), **options)


def test_draws_of_a_linear_model_have_its_moments(getkey):
    layer = nn.BayesianLinear(2, "scalar", posterior_scale=0.5, key=getkey())
    x = jnp.array([[1.0, 2.0]])
    outputs = bayes.predict_samples(layer, x, key=getkey(), num_samples=20_000)
    variance = 0.5**2 / 2 * (1 + 4) + 0.5**2
    np.testing.assert_allclose(np.std(outputs), variance**0.5, rtol=0.05)
