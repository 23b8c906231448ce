"""What a user is told who could not see it in the numbers."""

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import numpyro.distributions as dist
import pytest
from scipy import stats

from eqxlike import bayes, nn
from tests.bayes.methods.cases import X, Y, small_target


@pytest.fixture(autouse=True, scope="module")
def double_precision():
    with jax.enable_x64(True):
        yield


def hierarchical():
    prior = bayes.normal(0.0, dist.HalfNormal(1.0))
    return bayes.Posterior(small_target().network, prior, bayes.Gaussian(0.3), (X, Y))


@pytest.mark.filterwarnings("ignore:.* runs stopped before they came to a mode")
@pytest.mark.parametrize("method", [bayes.MAP(steps=2), bayes.DeepEnsemble(steps=2, members=2)])
def test_mode_under_a_prior_with_an_unknown_scale_is_doubted(method):
    with pytest.warns(bayes.InferenceWarning, match=r"unknowns of its own \(scale\), and the dens"):
        bayes.infer(hierarchical(), method, key=jr.key(0), progress=False)


@pytest.mark.parametrize(
    ("target", "method"),
    [(small_target, bayes.MAP()), (hierarchical, bayes.MeanField(steps=2))],
)
def test_no_doubt_where_there_is_none(target, method):
    bayes.infer(target(), method, key=jr.key(0), progress=False)


@pytest.mark.parametrize("probability", [0.001, 0.1, 0.3, 0.9])
def test_quantiles_of_counts_are_counts(probability):
    """NumPyro's CDF of it is NaN below zero."""
    mixture = bayes.Mixture(dist.NegativeBinomial2(jnp.full((2, 3), 3.0), 2.0))
    expected = stats.nbinom(2.0, 2.0 / 5.0).ppf(probability)
    np.testing.assert_array_equal(mixture.quantile(probability), np.full(3, expected))


class Twice(bayes.Likelihood):
    def distribution(self, output, unknowns):
        return dist.Normal(jnp.stack([output, output]), 0.3)


def test_likelihood_of_another_shape_than_the_targets():
    model = nn.Linear(2, "scalar", key=jr.key(0), dtype=jnp.float64)
    message = r"a target has shape \(\), and the distribution of Twice for it has shape \(2,\)"
    with pytest.raises(ValueError, match=message):
        bayes.Posterior(model, bayes.normal(), Twice(), (X, Y))


class WithNumber(bayes.Likelihood):
    def unknowns(self):
        return {"scale": 3.0}

    def distribution(self, output, unknowns):
        return dist.Normal(output, unknowns["scale"])


def test_number_in_place_of_an_unknown():
    model = nn.Linear(2, "scalar", key=jr.key(0), dtype=jnp.float64)
    with pytest.raises(TypeError, match=r"scale.* must be a distribution of `numpyro.dist"):
        bayes.Posterior(model, bayes.normal(), WithNumber(), (X, Y))
