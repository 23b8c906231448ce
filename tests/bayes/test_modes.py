"""Checks whether an optimiser has converged to a mode, and warnings if it has not."""

import functools

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import numpyro.distributions as dist
import optax
import pytest

import eqxlike as eqx
from eqxlike import bayes, nn
from eqxlike.bayes import _infer
from tests.bayes.methods.cases import LINEAR, X, Y, as_vectors, run

pytestmark = pytest.mark.usefixtures("double_precision")

STAYS = optax.set_to_zero()


def rise(posterior):
    found = posterior.diagnostics.rise
    assert found is not None
    return found


@functools.cache
def short():
    with pytest.warns(
        bayes.InferenceWarning, match="DeepEnsemble: 3 of 3 runs have not converged to a mode"
    ):
        return run(bayes.DeepEnsemble(steps=1, members=3, optimiser=STAYS))


def test_rise_of_a_normal_posterior_is_the_distance_to_its_maximum():
    places = as_vectors(short().samples(3, key=jr.key(0)))
    away = places - LINEAR.mean
    exact = np.einsum("ci,ij,cj->c", away, LINEAR.precision, away) / 2
    found = np.sort(rise(short()))
    np.testing.assert_allclose(found, np.sort(exact) / 3, rtol=1e-3)


def hierarchical():
    prior = bayes.normal(0.0, dist.HalfNormal(1.0))
    return bayes.Posterior(LINEAR.target.network, prior, bayes.Gaussian(0.3), (X, Y))


def test_mode_under_a_prior_with_an_unknown_scale_is_a_warning(monkeypatch):
    # Before the first step.
    monkeypatch.setattr(_infer, "advance", lambda *args: iter(()))
    with pytest.warns(bayes.InferenceWarning, match=r"unknowns of its own \(scale\), so the dens"):
        posterior = run(bayes.MAP(steps=2, batch_size=3), hierarchical())
    # Training with minibatches gives no additional warning.
    assert posterior.diagnostics.rise is None


def test_mean_field_has_no_warning_about_modes():
    assert bayes.MeanField().doubts(bayes.Problem(hierarchical())) == ()


def test_rise_with_more_unknowns_than_examples_is_per_example():
    model = nn.Linear(2, "scalar", key=jr.key(0), dtype=jnp.float64)
    model = eqx.tree_at(lambda model: model.weight, model, jnp.full((1, 2), 30.0))
    target = bayes.Posterior(model, bayes.normal(), bayes.Gaussian(1.0), (X[:1], Y[:1]))
    with pytest.warns(bayes.InferenceWarning, match="nats per unknown"):
        found = rise(run(bayes.MAP(steps=1, optimiser=STAYS), target))[0]
    design = LINEAR.design(X[:1])
    precision = design.T @ design + np.eye(3)
    away = np.append([30.0, 30.0], model.bias) - np.linalg.solve(precision, design.T @ Y[:1])
    np.testing.assert_allclose(found, away @ precision @ away / 2, rtol=1e-6)


def test_diverged_run_has_one_warning_about_its_loss():
    lost = optax.stateless(
        lambda updates, _: jax.tree.map(lambda each: jnp.full_like(each, np.inf), updates)
    )
    with pytest.warns(bayes.InferenceWarning) as caught:
        run(bayes.MAP(steps=2, optimiser=lost))
    assert len(caught) == 1
    message = str(caught[0].message)
    assert message.startswith("MAP: the loss of 1 of 1 runs ended at ")
    assert "a smaller learning rate may help" in message


def test_rise_is_printed():
    assert str(bayes.Diagnostics(rise=np.array([0.25, 3.0]))) == "rise: 0.25, 3"
