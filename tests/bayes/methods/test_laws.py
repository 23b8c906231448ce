"""Laws of every method of inference. The posterior is linear regression in closed form."""

import pathlib
import re

import arviz_stats
import jax
import jax.numpy as jnp
import jax.random as jr
import jax.tree_util as jtu
import numpy as np
import numpyro.distributions as dist
import pytest
from scipy import stats

import eqxlike as eqx
from eqxlike import bayes, nn
from eqxlike.bayes._fitted import fitted_from
from tests.bayes.methods.cases import (
    DROPOUT_RATE,
    LINEAR,
    METHODS,
    Rate,
    X,
    Y,
    as_vectors,
    check_moments,
    covariance_of,
    fitted,
    run,
    target_of,
)

# Not tested here. Laplace starts with a MAP. tests/bayes/test_infer.py, test_modes.py and
# test_samplers.py test ensembles.
POINTS = {"DeepEnsemble", "EarlyStoppedEnsemble", "MAP"}


@pytest.fixture(scope="module", params=sorted(METHODS.keys() - POINTS))
def name(request):
    """The name of a method. A module-scoped fixture, so that all laws test the same run."""
    return request.param


def layer_of(samples):
    return samples.model[1] if isinstance(samples.model, nn.Sequential) else samples.model


def equal(tree, other):
    jtu.tree_map(np.testing.assert_array_equal, tree, other)


def draws_of(posterior):
    """All draws of chains, or 2000 draws. All laws use this number and share one program."""
    is_chain = type(posterior.method).__name__ in {"HMC", "NUTS", "MCLMC", "SGLD", "SGHMC"}
    return posterior.samples(None if is_chain else 2000, key=jr.key(2))


def test_samples_are_networks_and_equal_samples_of_a_loaded_run(name, tmp_path: pathlib.Path):
    posterior = fitted(name)
    samples = draws_of(posterior)
    weight, bias = layer_of(samples).weight, layer_of(samples).bias
    assert (weight.shape[1:], bias.shape) == ((1, 2), (len(weight), 1))
    assert jtu.tree_leaves((samples.likelihood, samples.prior)) == []
    assert weight.dtype == bias.dtype == (jnp.float32 if name == "MCLMC" else jnp.float64)

    posterior.save(tmp_path / "posterior")
    loaded = bayes.load(tmp_path / "posterior", target_of(name), METHODS[name])
    equal(draws_of(loaded), samples)


def test_predictions_can_be_traced(name):
    def predicted(posterior, key):
        x = posterior.target.data[0][:3]
        return bayes.predict(posterior, x, key=key, num_samples=4).mean

    assert eqx.filter_eval_shape(predicted, fitted(name), jr.key(0)).shape == (3,)


def test_posterior_of_linear_regression_equals_the_closed_form(name):
    posterior = fitted(name)
    CLOSED_FORMS[name](posterior, as_vectors(draws_of(posterior)))


def check_chains(posterior, draws):
    found = posterior.convergence
    # Variances mix more slowly than means.
    ess = min(float(jnp.min(each)) for each in jax.tree.leaves((found.ess_bulk, found.ess_tail)))
    assert ess > 200
    check_moments(draws, LINEAR.mean, LINEAR.covariance, ess / 2)


def check_mclmc(posterior, draws):
    check_chains(posterior, draws)
    # The step size is tuned until the energy error has this variance.
    wanted = METHODS["MCLMC"].energy_variance
    found = posterior.records["energy_change"].var(axis=1).mean() / 3
    assert wanted / 4 < found < wanted * 4


def check_laplace(posterior, draws):
    np.testing.assert_allclose(posterior.found.mode, LINEAR.mean, rtol=1e-7)
    covariance = covariance_of(posterior.found.normal, 3)
    np.testing.assert_allclose(covariance, LINEAR.covariance, rtol=1e-8)
    np.testing.assert_allclose(posterior.log_evidence, LINEAR.log_evidence, rtol=1e-10)
    assert posterior.found.log_factors is None
    np.testing.assert_allclose(posterior.diagnostics.rise, [0.0], atol=1e-8)
    check_moments(draws, LINEAR.mean, LINEAR.covariance, len(draws))


def check_dropout(posterior, draws):
    # In a linear model, dropout of inputs is a ridge penalty (Wager, Wang and Liang, 2013).
    design = LINEAR.design(LINEAR.x)
    ridge = DROPOUT_RATE / (1 - DROPOUT_RATE) * np.diag(np.sum(design**2, axis=0) * [1, 1, 0])
    precision = LINEAR.precision + ridge / LINEAR.noise**2
    expected = np.linalg.solve(precision, design.T @ LINEAR.y / LINEAR.noise**2)
    np.testing.assert_allclose(draws[0], expected, atol=0.05)
    assert np.max(np.abs(expected - LINEAR.mean)) > 0.3
    assert posterior.diagnostics.rise is None


def check_mean_field(posterior, draws):
    """The optimal factors have variances 1 / P_ii (Bishop 2006, section 10.1.2)."""
    scale = 1 / np.sqrt(np.diag(LINEAR.precision))
    np.testing.assert_allclose((posterior.found.mean - LINEAR.mean) / scale, 0, atol=0.03)
    np.testing.assert_allclose(posterior.found.scale, scale, rtol=0.04)
    np.testing.assert_allclose(draws.std(axis=0), scale, rtol=0.15)
    assert posterior.diagnostics.rise is None


def check_pathfinder(posterior, draws):
    np.testing.assert_allclose(posterior.log_evidence, LINEAR.log_evidence, atol=0.05)
    check_moments(draws, LINEAR.mean, LINEAR.covariance, len(draws), atol=6)
    assert posterior.records == {}
    # With the centres of BlackJAX 1.7.1, the normals of short paths lose several nats.
    gaps = LINEAR.log_evidence - np.mean(posterior.chains.states.log_ratios, axis=1)
    assert np.max(gaps) < 0.5
    assert posterior.diagnostics.warnings == ()
    assert posterior.diagnostics.pareto_k < 0.7
    assert "Pareto k: " in str(posterior.diagnostics)


def check_stochastic(posterior, draws):
    method = posterior.method
    covariance = LINEAR.stationary_covariance(method)
    # The draws have a bias that is large enough to measure: they are wider than the posterior.
    ratio = np.max(np.diag(covariance) / np.diag(LINEAR.covariance))
    assert ratio > 1.1 * method.temperature
    # Each chain has one draw, so all draws are independent.
    check_moments(draws, LINEAR.mean, covariance, len(draws))
    assert posterior.diagnostics.broadening is None


def check_swag(posterior, draws):
    width = np.sqrt(np.diag(LINEAR.covariance))
    assert np.all(np.abs(draws.mean(axis=0) - LINEAR.mean) < width)
    assert np.all((draws.std(axis=0) > width / 3) & (draws.std(axis=0) < width * 3))
    assert posterior.records["loss"].shape == (1, METHODS["SWAG"].num_steps)
    assert posterior.diagnostics.rise is None


CLOSED_FORMS = {
    "HMC": check_chains,
    "Laplace": check_laplace,
    "MCDropout": check_dropout,
    "MCLMC": check_mclmc,
    "MeanField": check_mean_field,
    "NUTS": check_chains,
    "Pathfinder": check_pathfinder,
    "SGHMC": check_stochastic,
    "SGLD": check_stochastic,
    "SWAG": check_swag,
}


def test_diagnostics_have_the_nll_of_the_draws_and_of_one_network(name):
    posterior, (x, y) = fitted(name), target_of(name).data
    if posterior.method.leaves_out:
        assert posterior.diagnostics.predictive is None
        return
    found, key = posterior.diagnostics.predictive, jr.fold_in(posterior.key, 3)
    prediction = bayes.predict(posterior, x, key=key, num_samples=100)
    np.testing.assert_allclose(found.posterior, bayes.metrics.nll(prediction, y), rtol=1e-5)
    # Dropout is a ridge penalty, which moves the mode.
    best = stats.norm(LINEAR.design(x) @ LINEAR.mean, LINEAR.noise).logpdf(np.asarray(y))
    assert abs(found.point + best.mean()) < (1.0 if name == "MCDropout" else 0.05)
    assert not any("worse than the network" in text for text in posterior.diagnostics.warnings)


def test_every_method_is_in_the_registry():
    methods = {
        each
        for each, value in vars(bayes).items()
        if isinstance(value, type) and issubclass(value, bayes.Method) and value is not bayes.Method
    }
    assert methods == set(METHODS)
    assert all(type(method).__name__ == name for name, method in METHODS.items())


def test_heavy_importance_weights_are_a_warning():
    posterior = fitted("Pathfinder")
    shape = posterior.chains.states.log_ratios.shape
    # Weights from a Pareto distribution with k = 1.5.
    log_ratios = -1.5 * np.log(np.linspace(0, 1, shape[0] * shape[1] + 1)[1:]).reshape(shape)
    heavy = eqx.tree_at(lambda chains: chains.states.log_ratios, posterior.chains, log_ratios)
    again = fitted_from(posterior.problem, posterior.method, heavy, posterior.key)
    assert again.diagnostics.pareto_k > 0.7
    assert re.search(
        "the Pareto k of the importance weights is .*, where 0.7 or less is good",
        str(again.diagnostics.warnings),
    )


def test_draw_without_noise_has_no_dropout():
    posterior = fitted("MCDropout")
    sample = jax.tree.map(lambda each: each[0], draws_of(posterior))
    assert sample.noise is not None
    plain = bayes.Unknowns(sample.model, sample.likelihood, sample.prior)
    model = sample.model[1]
    target = LINEAR.target

    @jax.jit
    def found(plain, alone):
        densities = posterior.target.log_density(plain), target.log_density(alone)
        return posterior.model(plain)(X[0]), densities

    output, densities = found(plain, bayes.Unknowns(model, {}, {}))
    expected = np.sum(np.asarray(model.weight) @ X[0]) + np.sum(np.asarray(model.bias))
    np.testing.assert_allclose(output, expected, rtol=1e-12)
    np.testing.assert_allclose(*densities, rtol=1e-12)


# --- ArviZ ---------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:.*Pareto:UserWarning")
def test_arviz_has_draws_by_path_and_scores_the_model():
    posterior = fitted("HMC")
    tree, vectors = posterior.to_arviz(), posterior.records["draw"]
    assert set(tree.posterior.data_vars) == {"weight", "bias"}
    np.testing.assert_array_equal(tree.posterior["weight"].values[:, :, 0], vectors[:, :, :2])
    np.testing.assert_array_equal(tree.observed_data["y"], LINEAR.y)
    np.testing.assert_array_equal(tree.sample_stats["lp"], posterior.records["log_density"])
    assert set(tree.sample_stats.data_vars) >= {"diverging", "energy", "acceptance_rate"}

    mean = np.einsum("cni,bi->cnb", vectors, LINEAR.design(LINEAR.x))
    expected = stats.norm.logpdf(LINEAR.y, mean, LINEAR.noise)
    np.testing.assert_allclose(tree.log_likelihood["y"], expected, rtol=1e-9)
    scores = stats.norm(mean, LINEAR.noise).logpdf(LINEAR.y)
    left_out = -np.log(np.mean(np.exp(-scores), axis=(0, 1))).sum()
    np.testing.assert_allclose(arviz_stats.loo(tree).elpd, left_out, rtol=1e-3)


def test_methods_that_make_new_draws_need_a_key_for_arviz():
    posterior = fitted("Laplace")
    with pytest.raises(TypeError, match="to_arviz: Laplace makes new draws: pass"):
        posterior.to_arviz()


# --- bad input ----------------------------------------------------------------------------------

WRONG_SETTINGS = [
    (bayes.NUTS, {"target_acceptance": 1.0}, "NUTS: target_acceptance must be less than 1"),
    (bayes.NUTS, {"step_size": 0.0}, "NUTS: step_size must be positive"),
    (bayes.NUTS, {"num_samples": 0}, "NUTS: num_samples"),
    (bayes.NUTS, {"max_doublings": 0}, "NUTS: max_doublings"),
    (bayes.HMC, {"trajectory_steps": 0}, "HMC: trajectory_steps"),
    (bayes.MCLMC, {"num_warmup": 99}, "MCLMC: num_warmup must be at least 100, got 99"),
    (bayes.MCLMC, {"energy_variance": 0.0}, "MCLMC: energy_variance must be positive"),
    (bayes.Pathfinder, {"draws": 24}, "Pathfinder: draws must be an integer of at least 25"),
    (bayes.SGLD, {"step_size": 0.0}, "SGLD: step_size must be positive and finite, got 0.0"),
    (bayes.SGLD, {"decay": 1.5}, r"SGLD: decay must lie in \[0, 1\], got 1.5"),
    (bayes.SGLD, {"temperature": -1.0}, "SGLD: temperature must be positive and finite, got -1.0"),
    (bayes.SGLD, {"batch_size": 0}, "SGLD: batch_size must be an integer of at least 1, got 0"),
    (bayes.SGLD, {"descent_steps": -1}, "SGLD: descent_steps must be an .* at least 0, got -1"),
    (bayes.SGHMC, {"friction": 1.5}, r"SGHMC: friction must lie in \(0, 1\], got 1.5"),
    (bayes.SGHMC, {"trajectory_steps": 0}, "SGHMC: trajectory_steps must be an integer of at"),
    (
        bayes.EarlyStoppedEnsemble,
        {"validation_fraction": 0},
        r"validation_fraction must lie in \(0, 1\), got 0",
    ),
    (bayes.SWAG, {"rank": 1}, "SWAG: rank must be an integer of at least 2, got 1"),
    (bayes.SWAG, {"collect_every": 0}, "SWAG: collect_every must be an integer of at least 1"),
    (bayes.SWAG, {"collect_learning_rate": 0.0}, "SWAG: collect_learning_rate must be positive"),
    (
        bayes.SWAG,
        {"collect_steps": 30, "collect_every": 20},
        "SWAG: collect_steps must be at least twice collect_every, got 30 and 20",
    ),
    (bayes.MeanField, {"estimator": "global"}, 'must be "local", "flipout" or "weights"'),
    (
        bayes.Laplace,
        {"structure": "block"},
        "structure must be one of 'full', 'diagonal', 'kronecker', 'last_layer', None, got ",
    ),
    (
        bayes.Laplace,
        {"layer": "layers[0].*", "structure": "full"},
        "layer needs structure=\"last_layer\", but structure is 'full'",
    ),
]


def test_invalid_settings_are_errors():
    for kind, settings, message in WRONG_SETTINGS:
        with pytest.raises(ValueError, match=message):
            kind(**settings)
    with pytest.raises(TypeError, match=r"tune_prior must be a bool, got 2\.0"):
        bayes.Laplace(tune_prior=2.0)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match=r"by keyword: `bayes\.Laplace\(structure="):
        bayes.Laplace("last_layer")  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match=r"MAP: optimiser .* such as `optax.adam\(1e-3\)`; got"):
        bayes.MAP(optimiser="adam")  # pyright: ignore[reportArgumentType]
    # The limits of the allowed ranges.
    assert bayes.SGLD(decay=1.0).decay == 1
    assert bayes.SGHMC(friction=1.0).friction == 1
    assert bayes.SWAG(collect_steps=40, collect_every=20, rank=2).rank == 2


class WithoutKey(eqx.Module):
    layers: eqx.Module

    def __call__(self, x):
        return self.layers(x)


class KeyGoesNowhere(WithoutKey):
    def __call__(self, x, *, key=None):
        return self.layers(x)


def with_layers(*layers):
    return nn.Sequential([*layers, LINEAR.target.network])


def target_with(model=None, prior=None, likelihood=None, data=(X, Y)):
    model = LINEAR.target.network if model is None else model
    likelihood = bayes.Gaussian(0.5) if likelihood is None else likelihood
    return bayes.Posterior(model, bayes.normal() if prior is None else prior, likelihood, data)


def of_counts(prior=None):
    return target_with(prior=prior, likelihood=bayes.Poisson(), data=(X, np.arange(6)))


def of_rate():
    data, prior = (np.zeros((3, 1)), np.array([1, 2, 3])), dist.Gamma(2.0, 0.5)
    return target_with(Rate(jnp.array(1.0)), prior, bayes.Poisson(), data)


def large():
    model = nn.Linear(200, 200, key=jr.key(0), dtype=jnp.float64)
    return target_with(model, data=(np.zeros((2, 200)), np.zeros((2, 200))))


DROPOUT, LAPLACE, MC_DROPOUT = nn.Dropout(0.5), bayes.Laplace, bayes.MCDropout(steps=1)
WRONG_TARGETS = [
    (of_rate, bayes.MCLMC(), "needs at least 2 unknowns, .* the target has 1"),
    (
        lambda: LINEAR.target,
        *(bayes.SGLD(batch_size=31), "SGLD: batch_size is 31, but the data has only 30"),
    ),
    (
        lambda: LINEAR.target,
        *(bayes.SWAG(), "SWAG: batch_size is 32, but the data has only 30 examples"),
    ),
    (
        lambda: target_with(data=(X[:1], Y[:1])),
        *(bayes.EarlyStoppedEnsemble(), "EarlyStoppedEnsemble needs at least 2 examples"),
    ),
    (
        lambda: target_with(with_layers(nn.Dropout(0.0))),
        *(MC_DROPOUT, r"Sequential has no dropout. Add `nn.Dropout\(p=0.1\)`"),
    ),
    (
        lambda: target_with(WithoutKey(with_layers(DROPOUT))),
        *(MC_DROPOUT, r"WithoutKey takes no `key`. Write `def __call__"),
    ),
    (
        lambda: target_with(KeyGoesNowhere(with_layers(DROPOUT))),
        *(MC_DROPOUT, "`key` of KeyGoesNowhere does not reach its dropout"),
    ),
    (
        lambda: target_with(WithoutKey(with_layers())),
        bayes.MeanField(estimator="local"),
        r'estimator "local" calls the model as `model\(x, key=key\)`, but WithoutKey',
    ),
    (
        large,
        LAPLACE(structure="full"),
        r"structure='full' would need 12\.0 GiB \(1,616,040,000 numbers\) for 40,200 unknowns; "
        r"the limit is 4 GiB\. Use structure='kronecker' or 'diagonal' or 'last_layer'\.",
    ),
    (
        of_counts,
        LAPLACE(predictive="probit"),
        r'predictive="probit" needs classes.*the likelihood is Poisson\. "linearised" supports',
    ),
    (
        lambda: of_counts(dist.Laplace(0.0, 1.0)),
        *(LAPLACE(tune_prior=True), "needs normal.*have other priors: weight, bias"),
    ),
    (
        lambda: of_counts(bayes.normal(0.0, dist.HalfCauchy(1.0))),
        *(LAPLACE(tune_prior=True), "tune_prior=True needs normal priors"),
    ),
    (
        of_counts,
        LAPLACE(structure="last_layer", layer="layers[7].*"),
        r"layer 'layers\[7\]\.\*' matches no parameter\. The parameters are weight, bias\.",
    ),
]


def test_methods_that_do_not_fit_the_target_are_refused():
    for target, method, message in WRONG_TARGETS:
        with pytest.raises(ValueError, match=message):
            run(method, target())
