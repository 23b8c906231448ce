import sys

import arviz_base
import arviz_stats
import numpy as np
import pytest
import scipy.stats

from eqxlike.bayes import metrics

PRIOR_SCALE = 2.0


def posterior(y):
    """Mean and scale of the mean of normals of scale 1 with a normal prior: the conjugate pair."""
    precision = PRIOR_SCALE**-2 + len(y)
    return y.sum() / precision, precision**-0.5


@pytest.fixture(scope="module")
def conjugate():
    """Targets, and their log likelihoods under independent draws from the posterior."""
    generator = np.random.default_rng(0)
    y = generator.normal(1, 1, 40)
    mean, scale = posterior(y)
    draws = generator.normal(mean, scale, (4, 1000, 1))
    return y, scipy.stats.norm(draws, 1).logpdf(y)


def by_arviz(log_likelihoods, reff):
    tree = arviz_base.from_dict(
        {
            "posterior": {"mean": np.zeros(log_likelihoods.shape[:2])},
            "log_likelihood": {"y": log_likelihoods},
        }
    )
    return arviz_stats.loo(tree, reff=reff, pointwise=True)


def test_elpd_is_that_of_fitting_anew_without_each_example(conjugate):
    y, log_likelihoods = conjugate
    exact = []
    for left_out in range(len(y)):
        mean, scale = posterior(np.delete(y, left_out))
        exact.append(scipy.stats.norm(mean, np.hypot(scale, 1)).logpdf(y[left_out]))
    found = metrics.psis_loo(log_likelihoods)
    np.testing.assert_allclose(found.pointwise, exact, atol=0.02)
    np.testing.assert_allclose(found.elpd, np.sum(exact), atol=0.1)
    np.testing.assert_allclose(
        found.standard_error, np.sqrt(40) * np.std(exact, ddof=1), rtol=0.005
    )
    assert 0.5 < found.p_loo < 1.5


def test_of_independent_draws_it_is_that_of_arviz(conjugate):
    _, log_likelihoods = conjugate
    theirs = by_arviz(log_likelihoods, reff=1.0)
    ours = metrics.psis_loo(log_likelihoods.reshape(4000, 40))
    np.testing.assert_allclose(ours.elpd, theirs.elpd, rtol=1e-10)
    np.testing.assert_allclose(ours.p_loo, theirs.p, rtol=1e-10)
    np.testing.assert_allclose(ours.pointwise, theirs.elpd_i, rtol=1e-10)
    np.testing.assert_allclose(ours.pareto_k, theirs.pareto_k, rtol=1e-10)


def test_of_chains_it_takes_their_autocorrelation_into_account():
    generator = np.random.default_rng(0)
    chains = generator.normal(0, 1, (2, 500, 1))
    for draw in range(1, 500):
        chains[:, draw] = 0.9 * chains[:, draw - 1] + np.sqrt(1 - 0.9**2) * chains[:, draw]
    log_likelihoods = scipy.stats.norm(0.1 * chains, 1).logpdf(np.linspace(0.5, 2, 6))
    effective = arviz_stats.base.array_stats.ess(
        np.exp(log_likelihoods), chain_axis=0, draw_axis=1, method="mean"
    )
    theirs = by_arviz(log_likelihoods, reff=effective.mean() / 1000)
    ours = metrics.psis_loo(log_likelihoods)
    np.testing.assert_allclose(ours.pareto_k, theirs.pareto_k, rtol=1e-8)
    assert not np.allclose(ours.pareto_k, metrics.psis_loo(log_likelihoods[None, 0]).pareto_k)


def test_weights_with_a_heavy_tail_are_warned_of(conjugate):
    _, log_likelihoods = conjugate
    spoilt = log_likelihoods.reshape(4000, 40).copy()
    spoilt[:, 7] *= 100
    with pytest.warns(
        UserWarning, match=r"1 of 40 examples .* above 0\.70; the worst is example 7"
    ):
        metrics.psis_loo(spoilt)


def test_example_that_all_draws_agree_on_is_as_likely_without_it():
    log_likelihoods = np.random.default_rng(0).normal(size=(2, 200, 3)) / 10
    log_likelihoods[..., 1] = -1.5
    found = metrics.psis_loo(log_likelihoods)
    np.testing.assert_allclose(found.pointwise[1], -1.5, rtol=1e-10)
    assert found.pareto_k[1] == -np.inf


def test_example_that_one_draw_decides_is_warned_of():
    log_likelihoods = np.random.default_rng(0).normal(size=(200, 3)) / 10
    log_likelihoods[7, 1] = -1e6
    with pytest.warns(UserWarning, match="1 of 3 examples .* the worst is example 1, inf"):
        found = metrics.psis_loo(log_likelihoods)
    np.testing.assert_allclose(found.pointwise[1], -1e6, rtol=1e-4)


def test_another_number_of_axes_is_refused():
    for shape in ((4000,), (1, 2, 3, 4)):
        with pytest.raises(ValueError, match=r"\(S, N\) or \(chains, draws, N\), got shape"):
            metrics.psis_loo(np.zeros(shape))


def test_few_draws_are_refused():
    with pytest.raises(ValueError, match="at least 100 draws, got 20"):
        metrics.psis_loo(np.zeros((2, 10, 3)))


def test_one_example_is_refused():
    with pytest.raises(ValueError, match="at least 2 examples, got 1"):
        metrics.psis_loo(np.zeros((200, 1)))


def test_draws_that_are_all_alike_are_refused():
    found = np.tile(np.random.default_rng(0).normal(size=6), (200, 1))
    with pytest.raises(ValueError, match="all 200 draws give each example the same log likelihood"):
        metrics.psis_loo(found)


def test_draws_of_an_ensemble_are_warned_of():
    generator = np.random.default_rng(0)
    found = generator.normal(size=(5, 6))[generator.integers(0, 5, 200)]
    with pytest.warns(UserWarning, match="of 200 draws only 5 are different, as of an ensemble"):
        metrics.psis_loo(found)


def test_likelihoods_that_are_not_finite_are_refused():
    with pytest.raises(ValueError, match="1 of 600 log likelihoods are not finite"):
        metrics.psis_loo(np.append(np.zeros(599), -np.inf).reshape(200, 3))


def test_without_arviz_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "arviz_stats.base.array", None)
    with pytest.raises(ImportError, match=r"pip install 'eqxlike\[arviz\]'"):
        metrics.psis_loo(np.zeros((200, 3)))
