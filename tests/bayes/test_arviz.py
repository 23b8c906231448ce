"""Draws in ArviZ's form."""

import functools

import arviz_stats
import jax
import jax.random as jr
import numpy as np
import pytest

from eqxlike import bayes
from tests.bayes.methods.cases import LinearModel

pytestmark = pytest.mark.filterwarnings("ignore::eqxlike.bayes.InferenceWarning")

LINEAR = LinearModel(num_data=12)


@pytest.fixture(autouse=True, scope="module")
def double_precision():
    with jax.enable_x64(True):
        yield


@functools.cache
def chains():
    method = bayes.HMC(num_samples=100, num_warmup=50, chains=2, trajectory_steps=4)
    return bayes.infer(LINEAR.target, method, key=jr.key(0), progress=False)


def test_draws_have_the_paths_of_the_parameters_as_names():
    posterior = chains()
    tree = posterior.to_arviz()
    assert set(tree.posterior.data_vars) == {"weight", "bias"}
    vectors = np.asarray(posterior.records["draw"])
    np.testing.assert_array_equal(tree.posterior["weight"].values[:, :, 0], vectors[:, :, :2])
    np.testing.assert_array_equal(tree.observed_data["y"], LINEAR.y)
    np.testing.assert_array_equal(tree.sample_stats["lp"], posterior.records["log_density"])
    assert set(tree.sample_stats.data_vars) >= {"diverging", "energy", "acceptance_rate"}


@pytest.mark.filterwarnings("ignore:.*Pareto:UserWarning")
def test_arviz_judges_the_model_by_it():
    posterior = chains()
    tree = posterior.to_arviz()
    mean = np.einsum("cni,bi->cnb", np.asarray(posterior.records["draw"]), LINEAR.design(LINEAR.x))
    expected = -0.5 * ((LINEAR.y - mean) / LINEAR.noise) ** 2
    expected = expected - np.log(LINEAR.noise * np.sqrt(2 * np.pi))
    np.testing.assert_allclose(tree.log_likelihood["y"], expected, rtol=1e-9)
    ours = bayes.metrics.psis_loo(tree.log_likelihood["y"].values)
    np.testing.assert_allclose(ours.elpd, arviz_stats.loo(tree).elpd, rtol=1e-3)


def test_methods_that_draw_anew_need_a_key():
    posterior = bayes.infer(LINEAR.target, bayes.MAP(steps=2), key=jr.key(0), progress=False)
    with pytest.raises(TypeError, match="to_arviz: MAP draws anew, and needs a key"):
        posterior.to_arviz()
    assert posterior.to_arviz(7, key=jr.key(1)).posterior["weight"].shape == (1, 7, 1, 2)
