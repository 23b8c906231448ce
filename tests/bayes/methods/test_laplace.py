"""Laplace on models where it is exact. Each structure is compared with the dense matrix."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import numpyro.distributions as dist
import pytest
from scipy import optimize, stats
from scipy.special import softmax

import eqxlike as eqx
from eqxlike import ad, bayes, nn
from eqxlike.bayes._fitted import fitted_from
from eqxlike.bayes._libraries import as_libraries_compute
from eqxlike.bayes._method import Chains
from eqxlike.bayes._methods import _gauss_newton, _laplace_choices
from eqxlike.bayes._methods._curvature import positive_cholesky
from eqxlike.bayes._methods._descent import Optimised, climb
from eqxlike.bayes._methods._laplace_choices import untuned
from tests.bayes.methods.cases import LINEAR, covariance_of, run

NEW = np.random.default_rng(5).normal(size=(4, 2))
INPUTS, NEW_INPUTS = np.split(2.0 * np.random.default_rng(6).normal(size=(14, 3)), [10])
LABELS = np.random.default_rng(7).integers(0, 3, size=10)


PLACES = {}


def place_of(target):
    """The parameters of the model, computed once for each target."""
    if id(target) not in PLACES:
        problem = bayes.Problem(target)
        with as_libraries_compute():
            PLACES[id(target)] = np.asarray(jax.jit(lambda: problem.initial(jr.key(1)))()), target
    return PLACES[id(target)][0]


def around(target, mode=None, **fields):
    """Laplace around the parameters of the model, which need not be the mode."""
    fields = {"structure": "full", "width": 1.0} | fields
    problem, method = bayes.Problem(target, mode), bayes.Laplace(**fields)
    place = jnp.asarray(place_of(target))
    state = untuned(problem, place, ()) if method.tune_prior else Optimised(place, ())
    states = jax.tree.map(lambda each: each[None], state)
    return fitted_from(problem, method, Chains(0, states, {}), jr.key(1))


def predicting(posterior, predictive):
    method = dataclasses.replace(posterior.method, predictive=predictive)
    return dataclasses.replace(posterior, method=method)


def linear_target(likelihood, prior=None):
    """A linear model whose parameters are the mode of the closed form."""
    layer = nn.Linear(2, "scalar", key=jr.key(0), dtype=jnp.float64)
    weight, bias = (jnp.asarray(each) for each in (LINEAR.mean[None, :2], LINEAR.mean[2:]))
    layer = eqx.tree_at(lambda each: (each.weight, each.bias), layer, (weight, bias))
    prior = bayes.normal(0.0, 1.0) if prior is None else prior
    return bayes.Posterior(layer, prior, likelihood, (LINEAR.x, LINEAR.y))


@functools.cache
def linear():
    return around(linear_target(bayes.Gaussian(LINEAR.noise)))


@functools.cache
def small_target():
    model = nn.MLP(2, "scalar", width_size=3, depth=1, key=jr.key(0), dtype=jnp.float64)
    likelihood = bayes.Gaussian(dist.Gamma(20.0, 5.0))
    data = (LINEAR.x, np.sin(LINEAR.y))
    return bayes.Posterior(model, bayes.normal(0.0, 1.0), likelihood, data)


@functools.cache
def small(structure, **fields):
    """A network of 13 parameters with an unknown scale."""
    return around(small_target(), structure=structure, **fields)


class Convolution(eqx.Module):
    conv: nn.Conv1d
    readout: nn.Linear

    def __call__(self, x):
        return self.readout(jnp.tanh(self.conv(x.reshape(1, 3))).reshape(4))


@functools.cache
def classes_target():
    conv = nn.Conv1d(1, 2, kernel_size=2, key=jr.key(0), dtype=jnp.float64)
    model = Convolution(conv, nn.Linear(4, 3, key=jr.key(1), dtype=jnp.float64))
    data = (INPUTS, LABELS)
    return bayes.Posterior(model, bayes.normal(0.0, 1.0), bayes.Categorical(), data)


@functools.cache
def classes(structure="full"):
    """A convolution and a readout, of 21 parameters, for three classes."""
    return around(classes_target(), structure=structure)


@jax.numpy_rank_promotion("allow")
def linearised(target, x):
    """Outputs, (N, C), and their derivatives with respect to the unknowns, (N, C, d)."""
    problem = bayes.Problem(target)

    def outputs(vector):
        found = jax.vmap(target.model(problem.unknowns(vector)))(x).reshape(len(x), -1)
        return found, found

    jacobian, found = jax.jit(jax.jacfwd(outputs, has_aux=True))(place_of(target))
    return np.asarray(found), np.asarray(jacobian)


@functools.cache
def outputs_of_small():
    return linearised(small_target(), LINEAR.x)


@functools.cache
def logits_of_classes():
    return linearised(classes_target(), np.concatenate([INPUTS, NEW_INPUTS]))


def precision_of_small(prior_scale=1.0):
    """The Gauss-Newton matrix of 13 parameters with the exact Hessian of the log scale."""
    outputs, jacobian = (each[:, 0] for each in outputs_of_small())
    error, log_scale = outputs - np.sin(LINEAR.y), place_of(small_target())[-1]
    weight = np.exp(-2 * log_scale)
    precision = weight * jacobian.T @ jacobian + np.eye(14) / prior_scale**2
    precision[-1] = precision[:, -1] = -2 * weight * error @ jacobian
    precision[-1, -1] = 2 * weight * np.sum(error**2) + 5 * np.exp(log_scale)
    return precision


def precision_of_logits(logits, jacobian):
    """The Gauss-Newton matrix of a categorical likelihood with a standard normal prior."""
    chances, size = softmax(logits, axis=1), jacobian.shape[-1]
    inner = chances[:, :, None] * (np.eye(logits.shape[1]) - chances[:, None])
    of_data = np.einsum("nci,ncd,ndj->ij", jacobian, inner, jacobian, optimize=True)
    return of_data + np.eye(size)


def precision_of_classes():
    return precision_of_logits(*(each[: len(INPUTS)] for each in logits_of_classes()))


def block_precision(block):
    """The dense precision of a block of the structure `kronecker`."""
    bases = functools.reduce(np.kron, [np.asarray(basis) for basis in block.bases])
    return bases * np.asarray(block.values).reshape(-1) @ bases.T


# --- linear regression ----------------------------------------------------------------------------


def test_predictions_of_linear_regression_are_exact():
    mean, variance = LINEAR.predictive(NEW)
    prediction = bayes.predict(linear(), NEW, key=jr.key(2), num_samples=200)
    assert isinstance(prediction, bayes.Mixture)
    np.testing.assert_allclose(prediction.mean, mean, rtol=1e-8)
    np.testing.assert_allclose(prediction.variance, variance, rtol=1e-8)
    wanted = stats.norm(mean, np.sqrt(variance)).ppf(0.95)
    np.testing.assert_allclose(prediction.quantile(0.95), wanted, rtol=1e-3)
    for predictive in ("linearised", "probit"):
        with pytest.raises(
            ValueError, match="a single draw has no variance; use num_samples of at least 2"
        ):
            bayes.predict(predicting(linear(), predictive), NEW, key=jr.key(0), num_samples=1)


# --- structures -----------------------------------------------------------------------------------


def test_full_and_diagonal_equal_the_dense_matrix():
    precision = precision_of_classes()
    found = covariance_of(classes().found.normal, 21)
    np.testing.assert_allclose(found, np.linalg.inv(precision), rtol=1e-6, atol=1e-9)
    found = covariance_of(classes("diagonal").found.normal, 21)
    np.testing.assert_allclose(found, np.diag(1 / np.diag(precision)), rtol=1e-6)


def test_last_layer_equals_a_block_of_the_dense_matrix():
    # The last layer has the last 4 of 13 parameters. The scale follows.
    precision = precision_of_small()
    posterior = small("last_layer")
    found = covariance_of(posterior.found.normal, 5)
    np.testing.assert_allclose(found, np.linalg.inv(precision[9:, 9:]), rtol=1e-6)
    samples = posterior.samples(3, key=jr.key(0))
    first, last = (np.asarray(layer.weight) for layer in samples.model.layers)
    assert np.ptp(first, axis=0).max() == 0
    assert np.ptp(last, axis=0).min() > 0


def test_kronecker_is_exact_for_biases_and_the_scale():
    found, precision = small("kronecker").found, precision_of_small()
    # The blocks of both biases and of the scale.
    for index, start, stop in [(1, 6, 9), (3, 12, 13), (4, 13, 14)]:
        block = block_precision(found.normal.blocks[index])
        np.testing.assert_allclose(block, precision[start:stop, start:stop], rtol=1e-6)


def test_kronecker_is_the_nearest_kronecker_product():
    check_nearest(0, 0, (2, 2))
    check_nearest(2, 6, (3, 4))


def check_nearest(index, start, shape):
    size = shape[0] * shape[1]
    place = slice(start, start + size)
    wanted = precision_of_classes()[place, place] - np.eye(size)
    found = block_precision(classes("kronecker").found.normal.blocks[index]) - np.eye(size)
    # A rearranged Kronecker product has rank one (Van Loan and Pitsianis, 1993).
    rearranged = wanted.reshape(*shape, *shape).transpose(0, 2, 1, 3).reshape(shape[0] ** 2, -1)
    least = np.sqrt(np.sum(np.linalg.svd(rearranged, compute_uv=False)[1:] ** 2))
    assert least > 1e-3 * np.linalg.norm(wanted)
    assert np.linalg.norm(found - wanted) <= 1.001 * least


@pytest.mark.parametrize("structure", ["full", "diagonal", "kronecker"])
def test_draws_and_predictions_have_the_same_covariance(structure):
    normal, size = classes(structure).found.normal, 21
    of = eqx.filter_jit(lambda normal, rows: (normal.draw(rows), normal.log_det_precision))
    rows, log_det_precision = of(normal, np.eye(size))
    columns = np.asarray(rows).T
    expected = covariance_of(normal, size)
    np.testing.assert_allclose(columns @ columns.T, expected, rtol=1e-8, atol=1e-12)
    _, log_det = np.linalg.slogdet(expected)
    np.testing.assert_allclose(log_det_precision, -log_det, rtol=1e-8)


def test_curvature_does_not_depend_on_blocks_or_the_mode_of_differentiation(monkeypatch):
    expected = covariance_of(classes().found.normal, 21)
    monkeypatch.setattr(_gauss_newton, "_BLOCK_BYTES", 5000)  # blocks of some of the ten examples
    again = around(classes_target(), ad.Forward())
    np.testing.assert_allclose(covariance_of(again.found.normal, 21), expected, atol=1e-12)


def test_the_scale_of_a_hierarchical_prior_has_its_curvature():
    prior = bayes.normal(0.0, dist.HalfCauchy(1.0))
    target = linear_target(bayes.Gaussian(LINEAR.noise), prior)
    posterior = around(target, structure="diagonal")
    scale = np.exp(posterior.found.mode[-1])
    of_data = np.diag(LINEAR.precision) - 1
    of_scale = 2 * np.sum(LINEAR.mean**2) / scale**2 + 4 * scale**2 / (1 + scale**2) ** 2
    wanted = np.append(of_data + 1 / scale**2, of_scale)
    found = covariance_of(posterior.found.normal, 4)
    np.testing.assert_allclose(found, np.diag(1 / wanted), rtol=1e-6)


def test_negative_curvature_counts_by_its_absolute_value():
    rotation = np.linalg.qr(np.random.default_rng(0).normal(size=(3, 3)))[0]
    factor = positive_cholesky(jnp.asarray(rotation * np.array([4.0, -2.0, 1.0]) @ rotation.T))
    np.testing.assert_allclose(factor, np.tril(factor))
    assert np.all(np.diag(factor) > 0)
    wanted = rotation * np.array([4.0, 2.0, 1.0]) @ rotation.T
    np.testing.assert_allclose(factor @ factor.T, wanted, rtol=1e-10)


# --- many classes ---------------------------------------------------------------------------------


class Mixed(eqx.Module):
    """Each output depends on other rows, by an amount that differs between examples."""

    layer: nn.Linear

    def __call__(self, x):
        logits = self.layer(x)
        return logits + jnp.maximum(x[0], 0) * logits[::-1]


@functools.cache
def many_classes_target(is_mixed=False):
    """A linear classifier with 20 classes, at its mode."""
    x = 3 * np.random.default_rng(0).normal(size=(60, 3))
    layer = nn.Linear(3, 20, key=jr.key(0), dtype=jnp.float64)
    model = Mixed(layer) if is_mixed else layer
    labels = np.random.default_rng(1).integers(0, 20, size=60) ** 2 // 20
    target = bayes.Posterior(model, bayes.normal(), bayes.Categorical(), (x, labels))
    problem = bayes.Problem(target)
    with as_libraries_compute():
        place = jax.jit(lambda: climb(problem, problem.initial(jr.key(0)), 100))()
    PLACES[id(target)] = np.asarray(place), target
    return target


@functools.cache
def many_classes(is_mixed, structure):
    return around(many_classes_target(is_mixed), structure=structure)


@pytest.mark.parametrize("is_mixed", [False, True])
def test_many_classes_have_the_dense_precision(is_mixed):
    posterior, target = many_classes(is_mixed, "full"), many_classes_target(is_mixed)
    logits, jacobian = linearised(target, target.data[0])
    covariance = np.linalg.inv(precision_of_logits(logits, jacobian))
    np.testing.assert_allclose(covariance_of(posterior.found.normal, 80), covariance, atol=1e-8)
    x = target.data[0][:8]
    logits = bayes.predict(posterior, x, key=jr.key(2), num_samples=100).logits
    wanted = np.einsum("nci,ij,ncj->nc", jacobian[:8], covariance, jacobian[:8])
    np.testing.assert_allclose(np.var(logits, axis=0), wanted, rtol=1e-6)


def test_structures_agree_on_left_out_examples_of_many_classes():
    full, *others = (
        many_classes(False, structure).found.width.nll
        for structure in ("full", "kronecker", "diagonal")
    )
    np.testing.assert_allclose(others, full, atol=0.1)


# --- the scale of the prior -----------------------------------------------------------------------


class Two(eqx.Module):
    """Some inputs have weights of about 2, the other weights are 0."""

    used: nn.Linear
    unused: nn.Linear

    def __call__(self, x):
        return self.used(x[:3]) + self.unused(x[3:])


@pytest.mark.parametrize("max_full", [2000, 0])
def test_tuned_scales_have_the_greatest_evidence(max_full, monkeypatch):
    monkeypatch.setattr(_laplace_choices, "MAX_FULL", max_full)  # 0 selects Kronecker products.
    rng = np.random.default_rng(0)
    # The columns are orthogonal, so the precision has no terms between the two layers.
    x = np.linalg.qr(rng.normal(size=(40, 8)))[0] * 6
    y = x[:, :3] @ np.array([1.0, 3.0, -2.0]) + 0.5 * rng.normal(size=40) + 1.0
    keys, use = jr.split(jr.key(0)), {"use_bias": False, "dtype": jnp.float64}
    model = Two(
        nn.Linear(3, "scalar", key=keys[0], **use), nn.Linear(5, "scalar", key=keys[1], **use)
    )
    prior = bayes.prior_by_path({"used.*": bayes.normal(1.0, 0.5), "**": dist.Normal(0.0, 1.0)})
    target = bayes.Posterior(model, prior, bayes.Gaussian(0.5), (x, y))
    # A different number of steps causes a compilation with the new `MAX_FULL`.
    steps = 600 if max_full else 601
    method = bayes.Laplace(steps=steps, learning_rate=0.05, tune_prior=True)
    posterior = run(method, target)

    def minus_log_evidence(logs):
        scales = np.exp(np.repeat(logs, [3, 5]))  # One for each column.
        mean = x[:, :3].sum(axis=1)
        return -stats.multivariate_normal(mean, 0.25 * np.eye(40) + (x * scales**2) @ x.T).logpdf(y)

    best = optimize.minimize(minus_log_evidence, np.zeros(2), method="Nelder-Mead")
    assert posterior.log_evidence > -best.fun - 0.05
    assert posterior.diagnostics.prior_change < 0.05
    scale = 0.5 * np.exp(posterior.found.log_factors[0])
    np.testing.assert_allclose(scale, np.exp(best.x[0]), rtol=0.03)
    assert not posterior.diagnostics.warnings
    assert "prior scale of used.* " in str(posterior.diagnostics.choice)


def test_tuning_keeps_both_scales_moderate_if_only_their_product_matters():
    """Scaling one layer up and the other layer down does not change the outputs."""
    rng = np.random.default_rng(1)
    x = rng.normal(size=(80, 2))
    y = np.abs(x[:, 0]) - np.abs(x[:, 1]) + 0.1 * rng.normal(size=80)
    use = {"use_bias": False, "use_final_bias": False, "dtype": jnp.float64}
    model = nn.MLP(2, "scalar", 8, 1, **use, key=jr.key(0))
    prior = bayes.prior_by_path({"layers[0].*": bayes.normal(), "**": bayes.normal()})
    target = bayes.Posterior(model, prior, bayes.Gaussian(0.1), (x, y))
    tuned, untuned = (run(bayes.Laplace(tune_prior=each), target) for each in (True, False))
    assert tuned.log_evidence >= untuned.log_evidence - 0.1
    assert np.max(np.abs(tuned.found.log_factors)) < np.log(20)


# --- the width ------------------------------------------------------------------------------------


def test_leave_one_out_is_exact_for_a_linear_model():
    nlls = []
    for n in range(LINEAR.num_data):
        x, y = (np.delete(each, n, axis=0) for each in (LINEAR.design(LINEAR.x), LINEAR.y))
        covariance = np.linalg.inv(x.T @ x / LINEAR.noise**2 + np.eye(3))
        row = LINEAR.design(LINEAR.x)[n]
        mean = row @ covariance @ x.T @ y / LINEAR.noise**2
        spread = np.sqrt(row @ covariance @ row + LINEAR.noise**2)
        nlls.append(-stats.norm.logpdf(LINEAR.y[n], mean, spread))
    np.testing.assert_allclose(linear().found.width.nll, np.mean(nlls), rtol=1e-3)


def test_width_is_1_if_the_model_is_correct():
    x, layer = np.random.default_rng(3).normal(size=(40, 3)), nn.Linear(3, "scalar", key=jr.key(0))
    target = bayes.Posterior(layer, bayes.normal(), bayes.Bernoulli(), (x, np.zeros(40, int)))

    @jax.jit
    @jax.vmap
    def width(key):
        keys = jr.split(key, 3)
        y = target.simulate(target.sample_prior(key=keys[0]), key=keys[1])
        simulated = eqx.tree_at(lambda target: target.data[1], target, y)
        problem, method = bayes.Problem(simulated), bayes.Laplace()
        place = climb(problem, problem.initial(keys[0]), 20)
        states = Optimised(place[None], ())
        return method.finish(problem, states, {}, keys[2]).width.value

    with as_libraries_compute():
        widths = width(jr.split(jr.key(7), 60))
    assert np.all(np.asarray(widths) == 1)


def test_many_outputs_use_cholesky_factors(monkeypatch):
    method = {"structure": "kronecker", "width": None}
    expected = around(classes_target(), **method), jr.key(2)
    for module in (_gauss_newton, _laplace_choices):
        monkeypatch.setattr(module, "SMALL", 2)
    found = around(classes_target(), **method), jr.key(2)
    for name in ("normal", "log_evidence", "width"):
        wanted, got = (getattr(each.found, name) for each, _ in (expected, found))
        assert eqx.tree_equal(wanted, got, rtol=1e-6, atol=1e-9)
    moments = []
    for posterior, key in (expected, found):
        draws = bayes.predict(posterior, NEW_INPUTS, key=key, num_samples=8).logits
        moments.append((np.mean(draws, axis=0), np.var(draws, axis=0)))
    np.testing.assert_allclose(moments[1], moments[0], rtol=1e-6)


def test_predictions_are_better_than_the_mode_if_the_prior_is_too_wide():
    x = np.random.default_rng(0).normal(size=(260, 4))
    y = np.argmax(x[:, :3], axis=1)
    model = nn.MLP(4, 3, width_size=8, depth=1, key=jr.key(0), dtype=jnp.float64)
    data = x[:60], y[:60]
    target = bayes.Posterior(model, bayes.normal(0.0, 8.0), bayes.Categorical(), data)
    method = bayes.Laplace(steps=300, learning_rate=0.05)
    with pytest.warns(bayes.InferenceWarning, match="the covariance was multiplied by"):
        posterior = run(method, target)
    found = bayes.metrics.nll(bayes.predict(posterior, x[60:], key=jr.key(2)), y[60:])
    network = target.model(posterior.problem.unknowns(posterior.found.mode))
    log_chances = np.log(softmax(jax.jit(jax.vmap(lambda x: network(x)))(x[60:]), axis=1))
    assert found <= -1.05 * np.mean(log_chances[np.arange(200), y[60:]])
    assert "prior scale of" not in str(posterior.diagnostics.choice)


# --- predictions and evidence ---------------------------------------------------------------------


def logits_by_hand():
    """The means and covariances of the logits of new inputs."""
    means, jacobian = (each[len(INPUTS) :] for each in logits_of_classes())
    inverse = np.linalg.inv(precision_of_classes())
    return means, np.einsum("nci,ij,ndj->ncd", jacobian, inverse, jacobian)


def test_linearised_logits_have_the_dense_mean_and_covariance():
    means, wanted = logits_by_hand()
    prediction = bayes.predict(classes(), NEW_INPUTS, key=jr.key(2), num_samples=8)
    assert isinstance(prediction, bayes.CategoricalMixture)
    logits = np.asarray(prediction.logits)
    np.testing.assert_allclose(logits.mean(axis=0), means, rtol=1e-6)
    centred = logits - logits.mean(axis=0)
    found = np.einsum("snc,snd->ncd", centred, centred) / len(logits)
    np.testing.assert_allclose(found, wanted, rtol=1e-6)
    # One draw is too few to correct the covariance.
    prediction = bayes.predict(classes(), NEW_INPUTS, key=jr.key(2), num_samples=1)
    assert np.all(np.isfinite(prediction.logits))


def test_probit_divides_logits_by_their_spread():
    means, covariance = logits_by_hand()
    wanted = means / np.sqrt(1 + np.pi / 8 * np.diagonal(covariance, axis1=1, axis2=2))
    posterior = predicting(classes(), "probit")
    prediction = bayes.predict(posterior, NEW_INPUTS, key=jr.key(2), num_samples=2)
    assert isinstance(prediction, bayes.CategoricalMixture)
    expected = np.broadcast_to(wanted, (2, *wanted.shape))
    np.testing.assert_allclose(prediction.logits, expected, rtol=1e-6)


def test_sampled_predictions_are_outputs_of_the_draws():
    posterior = predicting(small("last_layer"), "sampled")
    prediction = bayes.predict(posterior, NEW, key=jr.key(2), num_samples=3)
    assert isinstance(prediction, bayes.Mixture)
    samples = posterior.samples(3, key=jr.split(jr.key(2))[0])
    wanted = jax.jit(jax.vmap(lambda sample: jax.vmap(posterior.model(sample))(NEW)))(samples)
    np.testing.assert_allclose(prediction.components.mean, wanted, rtol=1e-10)
