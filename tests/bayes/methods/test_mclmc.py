"""Microcanonical Langevin Monte Carlo."""

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import numpyro.distributions as dist
import pytest

import eqxlike as eqx
from eqxlike import bayes, nn
from tests.bayes.methods.cases import LinearModel, X, Y, as_vectors

LINEAR = LinearModel()

pytestmark = pytest.mark.usefixtures("as_methods_run")


def run(target, method):
    return bayes.infer(target, method, key=jr.key(1), progress=False)


@pytest.fixture(scope="module")
def by_defaults(as_methods_run):
    return run(LINEAR.target, bayes.MCLMC(num_samples=1500, chains=2))


def test_defaults_find_the_moments_of_linear_regression(by_defaults):
    posterior = by_defaults
    draws = as_vectors(posterior.samples(key=jr.key(0)))
    found = posterior.convergence
    # Variances mix more slowly than means.
    ess = min(float(jnp.min(each)) for each in jax.tree.leaves((found.ess_bulk, found.ess_tail)))
    assert ess > 500
    variance = np.diag(LINEAR.covariance)
    error = np.sqrt(variance / ess)
    np.testing.assert_allclose((draws.mean(axis=0) - LINEAR.mean) / error, 0, atol=5)
    relative = draws.var(axis=0) / variance - 1
    np.testing.assert_allclose(relative / np.sqrt(2 / (ess / 2)), 0, atol=5)


def test_a_smaller_energy_variance_takes_smaller_steps(by_defaults):
    method = bayes.MCLMC(num_samples=1, num_warmup=500, chains=1, energy_variance=1e-6)
    posterior = run(LINEAR.target, method)
    assert posterior.chains.states.step_size < 0.7 * by_defaults.chains.states.step_size.min()


def test_a_model_in_single_precision_is_tuned_in_double():
    model = nn.Linear(2, "scalar", key=jr.key(0), dtype=jnp.float32)
    target = bayes.Posterior(model, bayes.normal(), bayes.Gaussian(0.5), (X, Y))
    method = bayes.MCLMC(num_samples=2, num_warmup=100, chains=1)
    posterior = run(target, method)
    assert posterior.samples(key=jr.key(0)).model.weight.dtype == jnp.float32
    assert np.all(np.isfinite(posterior.records["draw"]))


class Rate(eqx.Module):
    """The same rate for all inputs."""

    rate: jax.Array

    def __call__(self, x):
        return jnp.log(self.rate)


def test_one_unknown_is_an_error():
    data = (np.zeros((3, 1)), np.array([1, 2, 3]))
    target = bayes.Posterior(Rate(jnp.array(1.0)), dist.Gamma(2.0, 0.5), bayes.Poisson(), data)
    with pytest.raises(ValueError, match="needs at least 2 unknowns; the target has 1"):
        run(target, bayes.MCLMC())


def test_a_warm_up_too_short_for_tuning_is_an_error():
    with pytest.raises(ValueError, match="MCLMC: num_warmup must be at least 100, got 99"):
        bayes.MCLMC(num_warmup=99)


def test_an_energy_variance_of_zero_is_an_error():
    with pytest.raises(ValueError, match="MCLMC: energy_variance must be positive"):
        bayes.MCLMC(energy_variance=0.0)
