"""Predictions with mixtures, expanded and transformed distributions of NumPyro."""

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import numpyro.distributions as dist
import pytest
import scipy.special
from scipy import stats

from eqxlike import bayes
from eqxlike.bayes import metrics
from eqxlike.bayes._libraries import as_libraries_compute
from eqxlike.bayes._predict import _mixture

OUTPUTS = jr.normal(jr.key(0), (3, 4, 2))

MAKERS = {
    "NegativeBinomial2": lambda out: dist.NegativeBinomial2(jnp.exp(out), 2.0),
    "ZeroInflatedPoisson": lambda out: dist.ZeroInflatedPoisson(0.3, jnp.exp(out)),
    "MixtureSameFamily": lambda out: dist.MixtureSameFamily(
        dist.Categorical(jnp.array([0.3, 0.7])), dist.Normal(jnp.stack([out, -out], axis=-1), 0.5)
    ),
    "expanded": lambda out: dist.LogNormal(out[..., :1], 0.5).expand(out.shape),
}


class Made(bayes.Likelihood):
    name: str

    def distribution(self, output, unknowns):
        return MAKERS[self.name](output)


def prediction(name, outputs=OUTPUTS):
    """The prediction for outputs with an axis of draws and an axis of inputs."""
    mixture = _mixture(Made(name), outputs, {})
    assert isinstance(mixture, bayes.Mixture)
    return mixture


def draws(make, num):
    """Draws from the distribution."""
    with as_libraries_compute():
        return np.asarray(jax.jit(lambda key: make().sample(key, (num,)))(jr.key(1)))


def test_draws_equal_draws_of_the_distribution_of_all_outputs():
    ours = draws(lambda: prediction("NegativeBinomial2").components, 5)
    theirs = draws(lambda: MAKERS["NegativeBinomial2"](OUTPUTS), 5)
    np.testing.assert_allclose(ours, theirs, rtol=1e-6)


def test_classes_have_probabilities_and_counts_have_quantiles():
    outputs = np.asarray(OUTPUTS)

    @jax.jit
    def found(outputs):
        logits = outputs[..., 0]
        mixtures = (
            _mixture(bayes.Bernoulli(), logits, {}),
            _mixture(bayes.Categorical(), outputs, {}),
            _mixture(bayes.Poisson(), logits[:1], {}),
        )
        assert isinstance(mixtures[0], bayes.CategoricalMixture)
        assert isinstance(mixtures[1], bayes.CategoricalMixture)
        assert isinstance(mixtures[2], bayes.Mixture)
        return mixtures[0].probabilities, mixtures[1].probabilities, mixtures[2].quantile(0.9)

    of_two, of_three, quantile = found(outputs)
    p = (1 / (1 + np.exp(-outputs[..., 0]))).mean(axis=0)
    np.testing.assert_allclose(of_two, np.stack([1 - p, p], axis=-1), rtol=1e-5)
    expected = scipy.special.softmax(outputs, axis=-1).mean(axis=0)
    np.testing.assert_allclose(of_three, expected, rtol=1e-5)
    np.testing.assert_array_equal(quantile, stats.poisson(np.exp(outputs[0, :, 0])).ppf(0.9))


def test_draws_of_mixtures_differ_from_each_other():
    drawn = draws(lambda: prediction("MixtureSameFamily").components, 5)
    assert drawn.shape == (5, 3, 4, 2)
    assert len(np.unique(drawn)) == drawn.size


def test_draws_of_expanded_distributions_have_their_moments():
    drawn = draws(lambda: prediction("expanded").components, 4000)
    assert drawn.shape == (4000, 3, 4, 2)
    expected = np.broadcast_to(np.asarray(OUTPUTS)[..., :1], (3, 4, 2))
    np.testing.assert_allclose(np.log(drawn).mean(axis=0), expected, atol=0.05)
    # The noise differs between entries.
    assert np.abs(np.corrcoef(np.log(drawn[..., 0, :]).reshape(4000, -1).T))[0, 1:].max() < 0.1


def test_score_of_zero_inflated_counts_equals_scipy():
    y, rates = np.array([0.0, 2.0]), np.exp(np.asarray(OUTPUTS[0, 0]))
    counts = np.arange(60)
    cdf = 0.3 + 0.7 * stats.poisson(rates[:, None]).cdf(counts)
    expected = np.mean(np.sum((cdf - (counts >= y[:, None])) ** 2, axis=1))

    @jax.jit
    def score(y):
        mixture = prediction("ZeroInflatedPoisson", OUTPUTS[:1, :1])
        return metrics.crps(y, mixture, key=jr.key(1), num_draws=9000)

    found = score(y[None].astype(np.float32))
    np.testing.assert_allclose(found, expected, rtol=0.05)


def test_error_names_a_distribution_without_a_cdf():
    message = (
        r"Mixture: NumPyro's ZeroInflatedPoisson does not implement 'cdf', which is needed .*"
        r"`components.sample\(key, \(1000,\)\)` has shape \(1000, 3, 4, 2\)"
    )
    mixture = prediction("ZeroInflatedPoisson")
    for use in (lambda: mixture.cdf(jnp.ones((4, 2))), lambda: mixture.interval(0.9)):
        with pytest.raises(NotImplementedError, match=message):
            use()


def test_error_names_a_distribution_without_a_mean():
    mixture = bayes.Mixture(logistic_normal())
    with pytest.raises(
        NotImplementedError, match="TransformedDistribution does not implement 'mean"
    ):
        _ = mixture.mean
    assert getattr(mixture, "variance", None) is None


def test_quantiles_need_no_mean():
    quantile = bayes.Mixture(logistic_normal()).quantile(0.5)
    np.testing.assert_allclose(quantile, 1 / (1 + np.exp(-2.0)), rtol=1e-5)


def logistic_normal():
    """A distribution over numbers with one component."""
    normal = dist.Normal(jnp.full((1, 1), 2.0), 0.5)
    return dist.TransformedDistribution(normal, dist.transforms.SigmoidTransform())
