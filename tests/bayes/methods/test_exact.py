"""Methods whose posterior is known in closed form: Markov chains, MAP and ensembles."""

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import numpyro.distributions as dist
import optax
import pytest
from scipy import stats

import eqxlike as eqx
from eqxlike import bayes
from tests.bayes.methods.cases import LinearModel, as_vectors

LINEAR = LinearModel()


@pytest.fixture(autouse=True, scope="module")
def double_precision():
    with jax.enable_x64(True):
        yield


def run(target, method):
    return bayes.infer(target, method, key=jr.key(1), progress=False)


def check_moments(draws, mean, variance, ess):
    """Means and variances within five Monte Carlo errors."""
    np.testing.assert_allclose((draws.mean(axis=0) - mean) / np.sqrt(variance / ess), 0, atol=5)
    relative = draws.var(axis=0) / variance - 1
    np.testing.assert_allclose(relative / np.sqrt(2 / ess), 0, atol=5)


@pytest.mark.parametrize(
    "method",
    [
        bayes.NUTS(num_samples=500, num_warmup=300, chains=2),
        bayes.NUTS(num_samples=500, num_warmup=300, chains=2, dense_mass=True),
        bayes.HMC(num_samples=1000, num_warmup=300, chains=2, trajectory_steps=8),
    ],
    ids=["NUTS", "NUTS, dense mass", "HMC"],
)
def test_chains_find_the_moments_of_linear_regression(method):
    posterior = run(LINEAR.target, method)
    draws = as_vectors(posterior.samples(key=jr.key(0)))
    found = posterior.convergence
    # Variances mix more slowly than means.
    ess = min(float(jnp.min(each)) for each in jax.tree.leaves((found.ess_bulk, found.ess_tail)))
    assert ess > 200
    check_moments(draws, LINEAR.mean, np.diag(LINEAR.covariance), ess / 2)


class Rate(eqx.Module):
    """The same rate for all inputs."""

    rate: jax.Array

    def __call__(self, x):
        return jnp.log(self.rate)


def test_linked_nuts_finds_the_gamma_posterior_of_a_rate():
    counts = np.array([3, 1, 4, 1, 5, 9, 2, 6])
    target = bayes.Posterior(
        Rate(jnp.array(1.0)), dist.Gamma(2.0, 0.5), bayes.Poisson(), (np.zeros((8, 1)), counts)
    )
    posterior = run(target, bayes.NUTS(num_samples=500, num_warmup=300, chains=2))
    draws = np.asarray(posterior.samples(key=jr.key(0)).model.rate)
    expected = stats.gamma(2.0 + counts.sum(), scale=1 / (0.5 + len(counts)))
    ess = float(posterior.convergence.ess_bulk.model.rate)
    check_moments(draws[:, None], expected.mean(), expected.var(), ess / 2)
    distance = np.max(np.abs(expected.cdf(np.sort(draws)) - np.linspace(0, 1, draws.size)))
    assert distance < 1.95 / np.sqrt(ess)  # Kolmogorov and Smirnov, 0.1%


@pytest.mark.parametrize(
    ("method", "rtol"),
    [
        (bayes.MAP(steps=30, optimiser=optax.lbfgs()), 1e-7),
        (bayes.MAP(), 1e-2),
        (bayes.DeepEnsemble(steps=30, members=3, optimiser=optax.lbfgs()), 1e-7),
    ],
    ids=["L-BFGS", "Adam", "ensemble"],
)
def test_optimisers_find_the_mode_of_linear_regression(method, rtol):
    posterior = run(LINEAR.target, method)
    draws = as_vectors(posterior.samples(3, key=jr.key(0)))
    np.testing.assert_allclose(draws, np.broadcast_to(LINEAR.mean, (3, 3)), rtol=rtol)


def test_minibatches_of_map_are_unbiased():
    method = bayes.MAP(steps=1, optimiser=optax.sgd(1.0), batch_size=4)
    problem = bayes.Problem(LINEAR.target)
    state = method.init(problem, jr.key(0))
    step = lambda key: method.step(problem, state, jnp.asarray(0), key)[0].place - state.place
    steps = jax.vmap(step)(jr.split(jr.key(1), 20_000))
    expected = jax.grad(problem.log_density)(state.place) / LINEAR.num_data
    error = np.std(steps, axis=0) / np.sqrt(len(steps))
    np.testing.assert_allclose((np.mean(steps, axis=0) - expected) / error, 0, atol=5)


def test_members_of_an_ensemble_begin_apart():
    problem = bayes.Problem(LINEAR.target)
    method = bayes.DeepEnsemble(members=3)
    places = [method.init(problem, key).place for key in jr.split(jr.key(0), 3)]
    assert len({tuple(np.asarray(place)) for place in places}) > 1
    for place in places:  # the same numbers in each array, in another order
        np.testing.assert_array_equal(np.sort(place[:2]), np.sort(problem.initial(jr.key(0))[:2]))
