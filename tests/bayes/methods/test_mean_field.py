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
from eqxlike.bayes._methods._mean_field import Normals, _kl
from tests.bayes.methods.cases import LinearModel, X, Y, small_target

LINEAR = LinearModel()
ESTIMATORS = ["local", "flipout", "weights"]


@pytest.fixture(autouse=True, scope="module")
def double_precision():
    with jax.enable_x64(True):
        yield


def run(target, method):
    return bayes.infer(target, method, key=jr.key(1), progress=False)


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_linear_regression_has_exact_means_and_the_diagonal_of_the_precision(estimator):
    """For a normal posterior the best factors have variances 1 / P_ii (Bishop 2006, 10.1.2)."""
    method = bayes.MeanField(steps=2000, learning_rate=0.02, estimator=estimator, draws=8)
    found = run(LINEAR.target, method).found
    scale = 1 / np.sqrt(np.diag(LINEAR.precision))
    np.testing.assert_allclose((found.mean - LINEAR.mean) / scale, 0, atol=0.03)
    np.testing.assert_allclose(found.scale, scale, rtol=0.04)


def hierarchical():
    """Normal priors whose scale is unknown, a uniform one, and an unknown noise."""
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
    mean = problem.initial(jr.key(0))
    return as_trees(problem, mean, jnp.linspace(-3.0, -1.0, problem.size))


def as_trees(problem, mean, rho):
    return Normals(problem.unflatten(mean), problem.unflatten(rho))


@pytest.mark.parametrize("target", [small_target, hierarchical])
def test_kl_is_that_of_draws(target):
    problem = bayes.Problem(target())
    place = somewhere(problem)
    noise = jr.normal(jr.key(0), (20_000, problem.size))
    mean, scale = problem.flatten(place.mean), jax.nn.softplus(problem.flatten(place.rho))
    drawn = mean[None] + scale[None] * noise

    def term(vector):
        unknowns, log_det = problem.target.constrain(problem.unflatten(vector))
        log_prior = problem.target.log_prior(unknowns) + log_det
        return jnp.sum(jax.scipy.stats.norm.logpdf(vector, mean, scale)) - log_prior

    expected = jax.vmap(term)(drawn)
    ours = jax.vmap(lambda vector: _kl(problem, place, problem.unflatten(vector)))(drawn)
    assert np.std(ours) < 0.8 * np.std(expected)
    error = np.std(expected) / np.sqrt(len(expected))
    np.testing.assert_allclose(np.mean(ours), np.mean(expected), atol=5 * error)


def test_kl_of_normal_priors_needs_no_draws():
    problem = bayes.Problem(LINEAR.target)
    mean, rho = jnp.array([0.1, -0.4, 2.0]), jnp.array([-1.0, 0.3, -2.0])
    place, scale = as_trees(problem, mean, rho), jax.nn.softplus(rho)
    expected = np.sum(-np.log(scale) + (scale**2 + mean**2 - 1) / 2)
    for seed in range(2):
        drawn = jr.normal(jr.key(seed), (3,))
        np.testing.assert_allclose(
            _kl(problem, place, problem.unflatten(drawn)), expected, rtol=1e-12
        )


@pytest.mark.parametrize("target", [small_target, hierarchical])
def test_estimators_agree_on_the_bound(target):
    problem = bayes.Problem(target())
    place = somewhere(problem)
    found = []
    for estimator in ESTIMATORS:
        method = bayes.MeanField(estimator=estimator)
        loss = functools.partial(
            method._loss_of_draw, problem, place, problem.target.data, jnp.asarray(1.0)
        )
        losses = np.asarray(jax.jit(jax.vmap(loss))(jr.split(jr.key(2), 20_000)))
        found.append((losses.mean(), losses.std() / np.sqrt(losses.size)))
    (local, local_error), *others = found
    for mean, error in others:
        np.testing.assert_allclose(mean, local, atol=5 * np.hypot(error, local_error))


def test_minibatches_leave_the_bound_unbiased():
    problem = bayes.Problem(LINEAR.target)
    place = as_trees(problem, jnp.zeros(3), jnp.zeros(3))
    whole = bayes.MeanField()._loss_of_draw
    data, weight = LINEAR.target.data, jnp.asarray(1.0)

    def of_batch(key):
        batch_key, key = jr.split(key)
        return whole(problem, place, problem.batch(batch_key, 5), weight, key)

    keys = jr.split(jr.key(0), 20_000)
    ours = jax.vmap(of_batch)(keys)
    others = jr.split(jr.key(1), 20_000)
    expected = jax.vmap(lambda key: whole(problem, place, data, weight, key))(others)
    error = np.std(ours) / np.sqrt(len(keys))
    np.testing.assert_allclose(np.mean(ours), np.mean(expected), atol=5 * error)


def test_kl_counts_by_its_weight_as_it_warms_up():
    problem = bayes.Problem(small_target())

    @jax.numpy_dtype_promotion("standard")
    @eqx.filter_jit
    def loss(method, index):
        state = method.init(problem, jr.key(0))
        return method.step(problem, state, index, jr.key(1))[1]["loss"]

    first = jnp.asarray(0)
    none, whole = (loss(bayes.MeanField(kl_weight=weight), first) for weight in (1e-12, 1.0))
    for index, part in [(0, 0.1), (1, 0.2), (9, 0.5), (50, 0.5)]:
        method = bayes.MeanField(kl_weight=0.5, warm_up=5)
        share = 0.5 * min(1.0, (index + 1) / 5)
        assert share == pytest.approx(part)
        np.testing.assert_allclose(
            loss(method, jnp.asarray(index)), none + share * (whole - none), rtol=1e-9
        )


# --- layers whose weights are random ------------------------------------------------------------


def random_model():
    key = jr.key(0)
    return nn.BayesianMLP(
        2, "scalar", 3, 1, prior_scale=0.5, posterior_scale=0.2, dtype=jnp.float64, key=key
    )


def test_bayesian_layers_bring_their_prior_and_where_to_begin():
    model = random_model()
    target = bayes.Posterior(model, None, bayes.Gaussian(0.3), (X, Y))
    unknowns = target.initial(key=jr.key(0))
    mean = nn.posterior_mean(model)
    np.testing.assert_array_equal(unknowns.model.layers[0].weight, mean.layers[0].weight)
    scales = [each.variance**0.5 for each in target.parameter_priors(unknowns).values()]
    expected = [layer.weight_prior_scale for layer in model.layers]
    np.testing.assert_allclose([scales[0][0, 0], scales[2][0, 0]], expected, rtol=1e-12)
    problem = bayes.Problem(target)
    place = bayes.MeanField().init(problem, jr.key(0)).place
    np.testing.assert_allclose(
        jax.nn.softplus(place.rho.model.layers[1].bias),
        jax.nn.softplus(model.layers[1].bias_rho),
        rtol=1e-9,
    )


def test_bound_is_that_of_negative_elbo():
    model = random_model()
    target = bayes.Posterior(model, None, bayes.Gaussian(0.3), (X, Y))
    problem = bayes.Problem(target)
    place = bayes.MeanField().init(problem, jr.key(0)).place
    kl = _kl(problem, place, place.mean)
    np.testing.assert_allclose(kl, nn.kl_divergence(model), rtol=1e-6)


@pytest.mark.filterwarnings("ignore:MAP. 1 of 1 runs stopped before they came to a mode")
@pytest.mark.parametrize("method", [bayes.MAP(steps=3), bayes.MeanField(steps=3)])
def test_convolutions_with_random_weights_go_in_as_they_are(method):
    class Network(eqx.Module):
        conv: nn.BayesianConv
        readout: nn.BayesianLinear

        def __call__(self, x, *, key=None):
            keys = (None, None) if key is None else jr.split(key)
            return self.readout(self.conv(x, key=keys[0]).reshape(-1), key=keys[1])

    conv = nn.BayesianConv(nn.Conv1d(1, 2, 2, key=jr.key(0), dtype=jnp.float64))
    model = Network(conv, nn.BayesianLinear(4, "scalar", key=jr.key(1), dtype=jnp.float64))
    target = bayes.Posterior(model, None, bayes.Gaussian(1.0), (np.ones((5, 1, 3)), np.ones(5)))
    samples = run(target, method).samples(2, key=jr.key(2))
    assert samples.model.conv.weight.shape == (2, 2, 1, 2)


def test_part_of_a_model_may_be_random():
    model = nn.to_bayesian(small_target().network, lambda model: model.layers[-1])
    with pytest.raises(ValueError, match=r"layers\[0\].weight is in no layer with random weights"):
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


def test_model_without_a_key_is_drawn_by_its_weights():
    posterior = run(without_key(), bayes.MeanField(steps=3))
    assert np.all(np.isfinite(posterior.records["loss"]))


@pytest.mark.parametrize("estimator", ["local", "flipout"])
def test_estimator_that_needs_a_key(estimator):
    message = f'estimator "{estimator}" calls the model by `model\\(x, key=key\\)`, and WithoutKey'
    with pytest.raises(ValueError, match=message):
        run(without_key(), bayes.MeanField(estimator=estimator))


def test_unknown_estimator():
    with pytest.raises(ValueError, match='estimator must be "local", "flipout" or "weights"'):
        bayes.MeanField(estimator="global")  # pyright: ignore[reportArgumentType]


def test_model_without_a_prior():
    with pytest.raises(TypeError, match=r"the model has no layer with a prior of its own"):
        bayes.Posterior(small_target().network, None, bayes.Gaussian(1.0), (X, Y))
