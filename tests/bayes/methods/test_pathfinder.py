"""Pathfinder: normal distributions along the paths of an optimiser."""

import jax.random as jr
import numpy as np
import pytest

from eqxlike import bayes
from tests.bayes.methods.cases import LinearModel, as_vectors

LINEAR = LinearModel()

pytestmark = pytest.mark.usefixtures("as_methods_run")


def run(target, method):
    return bayes.infer(target, method, key=jr.key(1), progress=False)


@pytest.fixture(scope="module")
def linear(as_methods_run):
    return run(LINEAR.target, bayes.Pathfinder(paths=4, path_steps=30))


def test_the_evidence_of_linear_regression_is_that_of_the_closed_form(linear):
    np.testing.assert_allclose(linear.log_evidence, LINEAR.log_evidence, atol=0.05)


def test_draws_have_the_moments_of_linear_regression(linear):
    num = 2000
    draws = as_vectors(linear.samples(num, key=jr.key(0)))
    white = np.linalg.solve(np.linalg.cholesky(LINEAR.covariance), (draws - LINEAR.mean).T)
    np.testing.assert_allclose(np.mean(white, axis=1) * np.sqrt(num), 0, atol=6)
    np.testing.assert_allclose((white @ white.T / num - np.eye(3)) * np.sqrt(num / 2), 0, atol=6)


def test_a_run_of_no_steps_has_no_records(linear):
    assert linear.records == {}
    assert linear.diagnostics.warnings == ()
    pareto_k = linear.diagnostics.pareto_k
    assert pareto_k is not None
    assert pareto_k < 0.7
    assert "Pareto k: " in str(linear.diagnostics)


def test_paths_cut_short_have_normals_centred_where_a_newton_step_leads():
    # Centred where BlackJAX 1.7.1 has them, some of these paths lose several nats.
    posterior = run(LINEAR.target, bayes.Pathfinder(paths=4, path_steps=5))
    gaps = LINEAR.log_evidence - np.mean(posterior.chains.states.log_ratios, axis=1)
    assert np.max(gaps) < 0.5


def test_draws_of_which_few_have_all_the_weight_are_warned_of():
    with pytest.warns(
        bayes.InferenceWarning,
        match="Pathfinder: the Pareto k of the importance weights is .*, where 0.7 or less is good",
    ):
        posterior = run(LINEAR.target, bayes.Pathfinder(paths=2, path_steps=2))
    pareto_k = posterior.diagnostics.pareto_k
    assert pareto_k is not None
    assert pareto_k > 0.7


def test_fewer_draws_than_a_tail_can_be_fitted_to_are_an_error():
    with pytest.raises(ValueError, match="Pathfinder: draws must be an integer of at least 25"):
        bayes.Pathfinder(draws=24)
