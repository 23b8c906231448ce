"""Targets that a model simulates, and calibration with simulated targets."""

import warnings

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest

from eqxlike import bayes, nn

pytestmark = [
    pytest.mark.usefixtures("double_precision"),
    pytest.mark.filterwarnings("ignore::eqxlike.bayes.InferenceWarning"),
]

X = np.linspace(-1.0, 1.0, 8)[:, None]


def target(likelihood, y=X[:, 0]):
    model = nn.Linear(1, "scalar", key=jr.key(0), dtype=jnp.float64)
    return bayes.Posterior(model, bayes.normal(), likelihood, (X, y))


def test_simulated_targets_have_the_moments_of_the_likelihood():
    problem = target(bayes.Gaussian(0.5))

    @jax.jit
    def both(keys):
        unknowns = problem.sample_prior(key=jr.key(1))
        draws = jax.vmap(lambda key: problem.simulate(unknowns, key=key))(keys)
        return draws, jax.vmap(problem.model(unknowns))(X)

    draws, mean = map(np.asarray, both(jr.split(jr.key(2), 4000)))
    np.testing.assert_allclose((draws.mean(0) - mean) / (0.5 / np.sqrt(4000)), 0, atol=5)
    np.testing.assert_allclose(draws.std(0), 0.5, rtol=0.06)


def test_simulated_classes_have_the_dtype_of_the_data():
    problem = target(bayes.Bernoulli(), np.array([0, 1] * 4, np.int8))
    y = jax.jit(lambda: problem.simulate(problem.sample_prior(key=jr.key(1)), key=jr.key(2)))()
    assert (y.dtype, y.shape) == (np.int8, (8,))
    assert set(np.asarray(y).tolist()) <= {0, 1}


def test_ranks_show_a_posterior_without_width():
    ranks = bayes.simulation_ranks(
        target(bayes.Gaussian(0.5)), bayes.MAP(steps=400), key=jr.key(0), num_simulations=10
    )
    assert set(np.unique(ranks)) == {0, 99}


def test_poor_runs_give_one_warning():
    method = bayes.MAP(steps=20, learning_rate=1e200)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        bayes.simulation_ranks(
            target(bayes.Gaussian(0.5)), method, key=jr.key(0), num_simulations=3
        )
    message = (
        "simulation_ranks: 3 of 3 runs of MAP have problems. The first, run 0: the loss of 1 of 1"
    )
    assert [(each.category, str(each.message)[: len(message)]) for each in caught] == [
        (bayes.InferenceWarning, message)
    ]
    assert caught[0].filename == __file__
