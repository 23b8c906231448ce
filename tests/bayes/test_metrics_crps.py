import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import scipy.integrate
import scipy.stats

from eqxlike import bayes
from eqxlike.bayes import metrics

Y, MEAN = np.random.default_rng(0).normal(size=(2, 50)).astype(np.float32)


def integrated(cdf, y):
    """The definition of the score: the integral of `(F(x) - 1[x >= y])^2`."""
    below, _ = scipy.integrate.quad(lambda x: cdf(x) ** 2, -60, y, points=[0, -5], limit=200)
    above, _ = scipy.integrate.quad(lambda x: (1 - cdf(x)) ** 2, y, 60, points=[5], limit=200)
    return below + above


def test_crps_equals_the_mean_over_pairs():
    draws = np.random.default_rng(1).normal(size=(7, 50))
    pairs = np.abs(draws[:, None] - draws[None]).mean((0, 1))
    expected = (np.abs(draws - Y).mean(0) - pairs / 2).mean()
    np.testing.assert_allclose(
        jax.jit(metrics.crps)(Y, draws.astype(np.float32)), expected, rtol=1e-4
    )


def test_crps_of_a_mixture_of_normals_equals_its_defining_integral():
    means, scales = np.array([[-1.0], [0.5], [2.0]]), np.array([[0.3], [1.0], [2.5]])
    exact = integrated(lambda x: scipy.stats.norm(means, scales).cdf(x).mean(), 0.7)
    with jax.enable_x64(True):
        mixture = bayes.Mixture(dist.Normal(means, scales))
        np.testing.assert_allclose(metrics.crps(np.array([0.7]), mixture), exact, rtol=1e-7)


def test_crps_of_components_of_zero_width_is_the_crps_of_their_means():
    means, y = jnp.array([[0.0], [2.0]]), jnp.array([3.0])
    mixture = bayes.Mixture(dist.Normal(means, 1e-25))
    np.testing.assert_allclose(metrics.crps(y, mixture), metrics.crps(y, means), rtol=1e-6)


def test_crps_of_an_expanded_normal_has_the_closed_form():
    @jax.jit
    def both(y, mean):
        whole = dist.Normal(mean[None], jnp.full((1, 50), 2.0))
        expanded = dist.Normal(mean, 2.0).expand([1, 50])
        return [metrics.crps(y, bayes.Mixture(each)) for each in (whole, expanded)]

    whole, expanded = both(Y, MEAN)
    np.testing.assert_allclose(expanded, whole, rtol=1e-6)


def test_crps_of_other_mixtures_is_the_crps_of_their_draws(getkey):
    @jax.jit
    def score(means, key):
        mixture = bayes.Mixture(dist.StudentT(4.0, means, 1.0))
        return metrics.crps(jnp.array([0.7]), mixture, key=key, num_draws=20_000)

    found = score(np.array([[-1.0], [2.0]], np.float32), getkey())
    cdf = lambda x: scipy.stats.t(4, [-1, 2]).cdf(x).mean()
    np.testing.assert_allclose(found, integrated(cdf, 0.7), rtol=0.03)
