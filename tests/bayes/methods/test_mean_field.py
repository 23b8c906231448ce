"""Variational inference with independent normal distributions."""

import functools

import jax
import jax.numpy as jnp
import jax.random as jr
import jax.tree_util as jtu
import numpy as np
import numpyro.distributions as dist
import pytest

import eqxlike as eqx
from eqxlike import bayes, nn
from eqxlike.bayes._methods._variational import Normals, _kl
from tests.bayes.methods.cases import LINEAR, X, Y, small_target

ESTIMATORS = ["local", "flipout", "weights"]


def hierarchical():
    """A model with normal priors of unknown scale, a uniform prior and unknown noise."""
    prior = bayes.prior_by_path(
        {
            "layers[0].weight": bayes.normal(0.3, dist.HalfCauchy(1.0)),
            "layers[0].bias": dist.Uniform(-3.0, 3.0),
            "**": dist.Normal(0.0, 2.0),
        }
    )
    model = small_target().network
    return bayes.Posterior(model, prior, bayes.Gaussian(dist.Gamma(2.0, 1.0)), (X, Y))


def somewhere(problem):
    rho = jnp.linspace(-3.0, -1.0, problem.size)
    return jax.jit(lambda: as_trees(problem, problem.initial(jr.key(0)), rho))()


def as_trees(problem, mean, rho):
    return Normals(problem.unflatten(mean), problem.unflatten(rho))


def test_kl_equals_its_monte_carlo_estimate():
    problem = bayes.Problem(hierarchical())
    place = somewhere(problem)
    noise = np.random.default_rng(0).normal(size=(5000, problem.size))

    @jax.jit
    def both(noise):
        mean, scale = problem.flatten(place.mean), jax.nn.softplus(problem.flatten(place.rho))

        def terms(noise):
            vector = mean + scale * noise
            linked = problem.unflatten(vector)
            unknowns, log_det = problem.target.constrain(linked)
            log_prior = problem.target.log_prior(unknowns) + log_det
            term = jnp.sum(jax.scipy.stats.norm.logpdf(vector, mean, scale)) - log_prior
            return _kl(problem, place, linked), term

        return jax.vmap(terms)(noise)

    ours, expected = map(np.asarray, both(noise))
    assert np.std(ours) < 0.8 * np.std(expected)
    error = np.std(expected) / np.sqrt(len(expected))
    np.testing.assert_allclose(np.mean(ours), np.mean(expected), atol=5 * error)


def test_kl_of_normal_priors_needs_no_draws():
    problem = bayes.Problem(LINEAR.target)
    mean, rho = np.array([0.1, -0.4, 2.0]), np.array([-1.0, 0.3, -2.0])
    place, scale = as_trees(problem, mean, rho), np.log1p(np.exp(rho))
    expected = np.sum(-np.log(scale) + (scale**2 + mean**2 - 1) / 2)
    kl = lambda vector: _kl(problem, place, problem.unflatten(vector))
    found = jax.jit(jax.vmap(kl))(np.random.default_rng(0).normal(size=(2, 3)))
    np.testing.assert_allclose(found, expected, rtol=1e-12)


def test_estimators_agree_on_the_bound():
    problem = bayes.Problem(small_target())
    place = somewhere(problem)

    @jax.jit
    def losses_of(keys):
        one, methods = jnp.asarray(1.0), [bayes.MeanField(estimator=each) for each in ESTIMATORS]
        of = [
            functools.partial(method._loss_of_draw, problem, place, problem.target.data, one)
            for method in methods
        ]
        return [jax.vmap(loss)(keys) for loss in of]

    with jax.debug_key_reuse(False):
        all_losses = map(np.asarray, losses_of(jr.split(jr.key(2), 5000)))
    found = [(losses.mean(), losses.std() / np.sqrt(losses.size)) for losses in all_losses]
    (local, local_error), *others = found
    for mean, error in others:
        np.testing.assert_allclose(mean, local, atol=5 * np.hypot(error, local_error))


def test_weight_of_the_kl_increases_during_its_warm_up():
    problem = bayes.Problem(LINEAR.target)
    method = bayes.MeanField(kl_weight=0.5, warm_up=5)

    @jax.jit
    @jax.numpy_dtype_promotion("standard")
    def both(indices):
        state = method.init(problem, jr.key(0))
        step = lambda index: method.step(problem, state, index, jr.key(1))[1]["loss"]
        place = as_trees(problem, *state.place)
        return jax.lax.map(step, indices), _kl(problem, place, place.mean)

    losses, kl = map(np.asarray, both(np.array([0, 1, 4, 9, 50])))
    gained = np.array([0.0, 0.1, 0.4, 0.4, 0.4]) * kl / LINEAR.num_data
    np.testing.assert_allclose(losses - losses[0], gained, rtol=1e-9, atol=1e-12)


# --- layers whose weights are random ------------------------------------------------------------


@eqx.filter_jit
def random_model():
    key = jr.key(0)
    return nn.BayesianMLP(
        2, "scalar", 3, 1, prior_scale=0.5, posterior_scale=0.2, dtype=jnp.float64, key=key
    )


def test_bayesian_layers_define_prior_and_initial_posterior():
    model = random_model()
    target = bayes.Posterior(model, None, bayes.Gaussian(0.3), (X, Y))
    problem = bayes.Problem(target)

    @jax.jit
    def begin():
        place = as_trees(problem, *bayes.MeanField().init(problem, jr.key(0)).place)
        unknowns = target.initial(key=jr.key(0))
        variances = [each.variance for each in target.parameter_priors(unknowns).values()]
        kls = _kl(problem, place, place.mean), nn.kl_divergence(model)
        rho = place.rho.model.layers[1].bias, model.layers[1].bias_rho
        scales = [jax.nn.softplus(each) for each in rho]
        weights = unknowns.model.layers[0].weight, nn.posterior_mean(model).layers[0].weight
        return weights, variances, kls, scales

    weights, variances, kls, scales = begin()
    np.testing.assert_array_equal(*weights)
    found = [np.asarray(variances[index])[0, 0] ** 0.5 for index in (0, 2)]
    expected = [layer.weight_prior_scale for layer in model.layers]
    np.testing.assert_allclose(found, expected, rtol=1e-12)
    np.testing.assert_allclose(*scales, rtol=1e-9)
    # The Kullback-Leibler divergence equals the term in `bayes.negative_elbo`.
    np.testing.assert_allclose(*kls, rtol=1e-6)


def test_part_of_a_model_may_be_random():
    model = nn.to_bayesian(small_target().network, lambda model: model.layers[-1])
    with pytest.raises(
        ValueError, match=r"layers\[0\].weight has no prior, because it is in no Bayesian layer"
    ):
        bayes.Posterior(model, None, bayes.Gaussian(1.0), (X, Y))
    frozen = nn.freeze(model, lambda model: model.layers[0])
    target = bayes.Posterior(frozen, None, bayes.Gaussian(1.0), (X, Y))
    assert len(jtu.tree_leaves(target.initial(key=jr.key(0)).model)) == 2


# --- bad input ----------------------------------------------------------------------------------


class WithoutKey(eqx.Module):
    linear: nn.Linear

    def __call__(self, x):
        return self.linear(x)


def without_key():
    model = WithoutKey(nn.Linear(2, "scalar", key=jr.key(0), dtype=jnp.float64))
    return bayes.Posterior(model, bayes.normal(), bayes.Gaussian(0.5), (X, Y))


def test_model_without_a_key_has_random_weights():
    problem, method = bayes.Problem(without_key()), bayes.MeanField()

    @jax.jit
    @jax.numpy_dtype_promotion("standard")
    def loss():
        state = method.init(problem, jr.key(0))
        return method.step(problem, state, jnp.asarray(0), jr.key(1))[1]["loss"]

    assert np.isfinite(loss())
