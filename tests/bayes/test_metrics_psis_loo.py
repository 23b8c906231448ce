import sys

import arviz_base
import arviz_stats
import numpy as np
import pytest
import scipy.stats

from eqxlike.bayes import metrics


@pytest.fixture(scope="module")
def conjugate():
    """Log likelihoods of normal targets under independent draws from the posterior of their mean,
    with a normal prior of scale 2.
    """
    generator = np.random.default_rng(0)
    y = generator.normal(1, 1, 40)
    precision = 2.0**-2 + len(y)
    draws = generator.normal(y.sum() / precision, precision**-0.5, (4, 1000, 1))
    return scipy.stats.norm(draws, 1).logpdf(y)


def by_arviz(log_likelihoods, reff):
    tree = arviz_base.from_dict(
        {
            "posterior": {"mean": np.zeros(log_likelihoods.shape[:2])},
            "log_likelihood": {"y": log_likelihoods},
        }
    )
    return arviz_stats.loo(tree, reff=reff, pointwise=True)


def test_of_independent_draws_it_is_that_of_arviz(conjugate):
    theirs = by_arviz(conjugate, reff=1.0)
    ours = metrics.psis_loo(conjugate.reshape(4000, 40))
    np.testing.assert_allclose(ours.elpd, theirs.elpd, rtol=1e-10)
    np.testing.assert_allclose(ours.p_loo, theirs.p, rtol=1e-10)
    np.testing.assert_allclose(ours.pointwise, theirs.elpd_i, rtol=1e-10)
    np.testing.assert_allclose(ours.pareto_k, theirs.pareto_k, rtol=1e-10)
    error = np.sqrt(40) * np.std(theirs.elpd_i, ddof=1)
    np.testing.assert_allclose(ours.standard_error, error, rtol=1e-10)


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
    spoilt = conjugate.reshape(4000, 40).copy()
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


def test_what_says_nothing_of_leaving_out_is_refused():
    for found, message in [
        (np.zeros(4000), r"\(S, N\) or \(chains, draws, N\), got shape"),
        (np.zeros((1, 2, 3, 4)), r"\(S, N\) or \(chains, draws, N\), got shape"),
        (np.zeros((2, 10, 3)), "at least 100 draws, .* got 20"),
        (np.zeros((200, 1)), "at least 2 examples, got 1"),
        (np.append(np.zeros(599), -np.inf).reshape(200, 3), "1 of 600 log likelihoods are not fin"),
        (np.zeros((200, 6)), "all 200 draws give each example the same log likelihood"),
    ]:
        with pytest.raises(ValueError, match=message):
            metrics.psis_loo(found)


def test_draws_of_an_ensemble_are_warned_of():
    generator = np.random.default_rng(0)
    found = generator.normal(size=(5, 6))[generator.integers(0, 5, 200)]
    with pytest.warns(UserWarning, match="only 5 of 200 draws are distinct, as for an ensemble"):
        metrics.psis_loo(found)


def test_without_arviz_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "arviz_stats.base.array", None)
    with pytest.raises(ImportError, match=r"pip install 'eqxlike\[arviz\]'"):
        metrics.psis_loo(np.zeros((200, 3)))
