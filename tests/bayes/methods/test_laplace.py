"""Laplace: exact where the posterior is normal, and each structure beside the dense matrix."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import numpyro.distributions as dist
import optax
import pytest
from scipy import differentiate, integrate, optimize, stats
from scipy.special import expit

import eqxlike as eqx
from eqxlike import ad, bayes, nn
from eqxlike.bayes._curvature import _around
from eqxlike.bayes._curvature._positive import positive_cholesky
from eqxlike.bayes._inference._fitted import fitted_from
from tests.bayes.methods.cases import LinearModel

LINEAR = LinearModel()
STRUCTURES = ("full", "kronecker", "diagonal", "last_layer")
NEW = np.random.default_rng(5).normal(size=(4, 2))
INPUTS = 2.0 * np.random.default_rng(6).normal(size=(10, 2))
LABELS = np.random.default_rng(7).integers(0, 3, size=10)


@pytest.fixture(autouse=True, scope="module")
def double_precision():
    with jax.enable_x64(True):
        yield


def start(target, mode=None):
    """A run that stays at the parameters that the model has."""
    method = bayes.MAP(steps=1, optimiser=optax.set_to_zero())
    return bayes.infer(target, method, key=jr.key(1), progress=False, mode=mode)


def around(run, **fields):
    """Laplace around where a run ended, be that the most probable place or not."""
    if not isinstance(run, bayes.FittedPosterior):
        run = start(run)
    return fitted_from(run.problem, bayes.Laplace(**fields), run.chains, run.key)


def predicting(posterior, predictive):
    method = dataclasses.replace(posterior.method, predictive=predictive)
    return dataclasses.replace(posterior, method=method)


def linear_target(likelihood):
    """A model with the parameters of the closed form."""
    layer = nn.Linear(2, "scalar", key=jr.key(0), dtype=jnp.float64)
    weight, bias = (jnp.asarray(each) for each in (LINEAR.mean[None, :2], LINEAR.mean[2:]))
    layer = eqx.tree_at(lambda each: (each.weight, each.bias), layer, (weight, bias))
    return bayes.Posterior(layer, bayes.normal(0.0, 1.0), likelihood, (LINEAR.x, LINEAR.y))


@functools.cache
def linear():
    return around(linear_target(bayes.Gaussian(LINEAR.noise)))


@functools.cache
def small_start():
    model = nn.MLP(2, "scalar", width_size=3, depth=1, key=jr.key(0), dtype=jnp.float64)
    likelihood = bayes.Gaussian(dist.Gamma(20.0, 5.0))
    target = bayes.Posterior(
        model, bayes.normal(0.0, 1.0), likelihood, (LINEAR.x, np.sin(LINEAR.y))
    )
    return start(target)


@functools.cache
def small(structure="full", **fields):
    """A network of 13 parameters with an unknown scale."""
    return around(small_start(), structure=structure, **fields)


def classes_target(num=10):
    model = nn.MLP(2, 3, width_size=3, depth=1, key=jr.key(0), dtype=jnp.float64)
    data = (INPUTS[:num], LABELS[:num])
    return bayes.Posterior(model, bayes.normal(0.0, 1.0), bayes.Categorical(), data)


@functools.cache
def classes_start():
    return start(classes_target())


@functools.cache
def classes(structure="full"):
    """A network of 21 parameters for three classes."""
    return around(classes_start(), structure=structure)


# --- the same by hand ---


def num_parameters(posterior):
    return sum(leaf.size for leaf in jax.tree.leaves(posterior.target.initial(key=jr.key(0)).model))


@jax.numpy_dtype_promotion("standard")
@jax.numpy_rank_promotion("allow")
def jacobian_by_hand(posterior, x):
    """Of shape (N, C, d)."""
    problem = posterior.problem

    def outputs(vector):
        return jax.vmap(problem.target.model(problem.unknowns(vector)))(x).reshape(len(x), -1)

    return np.asarray(jax.jacfwd(outputs)(posterior.found.mode))


@jax.numpy_dtype_promotion("standard")
@jax.numpy_rank_promotion("allow")
def precision_by_hand(posterior):
    """The Gauss-Newton matrix of the parameters, and the exact Hessian of everything else."""
    problem, target, mode = posterior.problem, posterior.target, posterior.found.mode
    x, y = target.data
    jacobian = jacobian_by_hand(posterior, x)
    outputs = jax.vmap(target.model(problem.unknowns(mode)))(x)
    own = problem.unknowns(mode).likelihood

    def log_prob(output, y):
        return target.likelihood.log_prob(output, own, y)

    size = jacobian.shape[1]
    inner = -jax.vmap(jax.hessian(log_prob))(outputs, y).reshape(-1, size, size)
    gauss_newton = np.einsum("nci,ncd,ndj->ij", jacobian, inner, jacobian)

    def log_prior(vector):
        unknowns, log_det = target.constrain(problem.unflatten(vector))
        return target.log_prior(unknowns) + log_det

    is_other = np.arange(problem.size) >= num_parameters(posterior)
    exact = -jax.hessian(problem.log_density)(mode)
    approximate = gauss_newton - jax.hessian(log_prior)(mode)
    return np.where(is_other[:, None] | is_other[None, :], exact, approximate)


def covariance_of(normal, size):
    rows = np.asarray(normal.whitened(jnp.eye(size)))
    return rows @ rows.T


def block_precision(block):
    """The precision that a block of `kronecker` stands for."""
    bases = functools.reduce(np.kron, [np.asarray(basis) for basis in block.bases])
    return bases * np.asarray(block.values).reshape(-1) @ bases.T


# --- exact ---


def test_posterior_of_linear_regression_is_exact():
    method = bayes.Laplace(steps=30, optimiser=optax.lbfgs())
    found = bayes.infer(LINEAR.target, method, key=jr.key(1), progress=False).found
    np.testing.assert_allclose(found.mode, LINEAR.mean, rtol=1e-8)
    np.testing.assert_allclose(covariance_of(found.normal, 3), LINEAR.covariance, rtol=1e-8)


@pytest.mark.parametrize("num_samples", [2, 7, 100])
def test_predictions_of_linear_regression_are_exact(num_samples):
    prediction = bayes.predict(linear(), NEW, key=jr.key(2), num_samples=num_samples)
    assert isinstance(prediction, bayes.Mixture)
    mean, variance = LINEAR.predictive(NEW)
    np.testing.assert_allclose(prediction.mean, mean, rtol=1e-8)
    np.testing.assert_allclose(prediction.variance, variance, rtol=1e-8)


def test_quantiles_of_linear_regression_are_nearly_exact():
    prediction = bayes.predict(linear(), NEW, key=jr.key(2), num_samples=200)
    assert isinstance(prediction, bayes.Mixture)
    mean, variance = LINEAR.predictive(NEW)
    wanted = stats.norm(mean, np.sqrt(variance)).ppf(0.95)
    np.testing.assert_allclose(prediction.quantile(0.95), wanted, rtol=1e-3)


def test_evidence_of_linear_regression_is_exact():
    np.testing.assert_allclose(linear().log_evidence, LINEAR.log_evidence, rtol=1e-10)


def test_several_targets_have_the_exact_variances():
    model = nn.Linear(2, 2, key=jr.key(0), dtype=jnp.float64)
    targets = np.stack([LINEAR.y, 3.0 * LINEAR.x[:, 0]], axis=1)
    likelihood = bayes.Gaussian(LINEAR.noise)
    target = bayes.Posterior(model, bayes.normal(0.0, 1.0), likelihood, (LINEAR.x, targets))
    prediction = bayes.predict(around(target), NEW, key=jr.key(2), num_samples=5)
    assert isinstance(prediction, bayes.Mixture)
    _, variance = LINEAR.predictive(NEW)
    # Both have the same inputs and the same noise.
    expected = np.stack([variance, variance], axis=1)
    np.testing.assert_allclose(prediction.variance, expected, rtol=1e-8)


# --- structures ---


@pytest.mark.parametrize("posterior", [small, classes])
def test_full_is_the_dense_matrix(posterior):
    precision = precision_by_hand(posterior())
    found = covariance_of(posterior().found.normal, len(precision))
    np.testing.assert_allclose(found, np.linalg.inv(precision), rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("posterior", [small, classes])
def test_diagonal_is_that_of_the_dense_matrix(posterior):
    precision = precision_by_hand(posterior())
    found = covariance_of(posterior("diagonal").found.normal, len(precision))
    np.testing.assert_allclose(found, np.diag(1 / np.diag(precision)), rtol=1e-6)


def test_last_layer_is_its_block_of_the_dense_matrix():
    # Of 13 parameters those of the last layer are 4; after them comes the scale.
    precision = precision_by_hand(small())[9:, 9:]
    found = covariance_of(small("last_layer").found.normal, 5)
    np.testing.assert_allclose(found, np.linalg.inv(precision), rtol=1e-6)


def test_other_layers_stay_at_the_mode():
    samples = small("last_layer").samples(3, key=jr.key(0))
    first, last = (np.asarray(layer.weight) for layer in samples.model.layers)
    assert np.ptp(first, axis=0).max() == 0
    assert np.ptp(last, axis=0).min() > 0


def test_a_layer_can_be_named():
    precision = precision_by_hand(small())
    kept = np.r_[0:9, 13]
    found = covariance_of(small("last_layer", layer="layers[0].*").found.normal, 10)
    np.testing.assert_allclose(
        found, np.linalg.inv(precision[np.ix_(kept, kept)]), rtol=1e-6, atol=1e-9
    )


def test_kronecker_is_exact_for_the_layers_of_one_example():
    posterior = around(classes_target(1), structure="kronecker")
    precision = precision_by_hand(posterior)
    start = 0
    for block in posterior.found.normal.blocks:
        stop = start + block.values.size
        found = block_precision(block)
        np.testing.assert_allclose(found, precision[start:stop, start:stop], rtol=1e-6, atol=1e-8)
        start = stop


def test_kronecker_keeps_all_of_arrays_that_are_no_matrices():
    precision = precision_by_hand(small())
    # The biases of both layers, and the scale.
    for index, start, stop in [(1, 6, 9), (3, 12, 13), (4, 13, 14)]:
        block = block_precision(small("kronecker").found.normal.blocks[index])
        np.testing.assert_allclose(block, precision[start:stop, start:stop], rtol=1e-6)


class Convolution(eqx.Module):
    conv: nn.Conv1d

    def __call__(self, x):
        return jnp.sum(jnp.tanh(self.conv(x.reshape(1, 5))))


@functools.cache
def convolution():
    x = np.random.default_rng(0).normal(size=(7, 5))
    model = Convolution(nn.Conv1d(1, 2, kernel_size=2, key=jr.key(0), dtype=jnp.float64))
    data = (x, np.sin(x[:, 0]))
    target = bayes.Posterior(model, bayes.normal(0.0, 1.0), bayes.Gaussian(0.3), data)
    return around(target, structure="kronecker")


@pytest.mark.parametrize(
    ("posterior", "shape"),
    [(lambda: classes("kronecker"), (3, 2)), (convolution, (2, 2))],
    ids=["layer of a network", "convolution"],
)
def test_kronecker_is_as_near_as_the_nearest_product(posterior, shape):
    size = shape[0] * shape[1]
    wanted = precision_by_hand(posterior())[:size, :size] - np.eye(size)
    found = block_precision(posterior().found.normal.blocks[0]) - np.eye(size)
    # Van Loan and Pitsianis: rearranged, a Kronecker product has rank one.
    rearranged = wanted.reshape(*shape, *shape).transpose(0, 2, 1, 3).reshape(shape[0] ** 2, -1)
    least = np.sqrt(np.sum(np.linalg.svd(rearranged, compute_uv=False)[1:] ** 2))
    assert least > 1e-3 * np.linalg.norm(wanted)
    assert np.linalg.norm(found - wanted) <= 1.001 * least


def test_kronecker_is_nearer_than_kfac():
    posterior = classes("kronecker")
    wanted = precision_by_hand(posterior)[:6, :6] - np.eye(6)
    found = block_precision(posterior.found.normal.blocks[0]) - np.eye(6)
    # Of the first layer: inputs `a`, and gradients `g` of the outputs, which have curvature `L`.
    logits = jax.vmap(posterior.target.network)(INPUTS)
    p = np.asarray(jax.nn.softmax(logits))
    inner = np.einsum("ni,ij->nij", p, np.eye(3)) - np.einsum("ni,nj->nij", p, p)
    g = jacobian_by_hand(posterior, INPUTS)[:, :, 6:9]
    products = np.einsum("nci,ncd,ndj->ij", g, inner, g), INPUTS.T @ INPUTS / len(INPUTS)
    assert np.linalg.norm(found - wanted) < np.linalg.norm(np.kron(*products) - wanted)


@pytest.mark.parametrize("structure", STRUCTURES)
def test_draws_and_predictions_have_one_covariance(structure):
    normal = classes(structure).found.normal
    size = 12 if structure == "last_layer" else 21
    columns = np.asarray(normal.scaled(jnp.eye(size))).T
    expected = covariance_of(normal, size)
    np.testing.assert_allclose(columns @ columns.T, expected, rtol=1e-8, atol=1e-12)
    _, log_det = np.linalg.slogdet(expected)
    np.testing.assert_allclose(normal.log_det_precision, -log_det, rtol=1e-8)


def test_curvature_does_not_depend_on_the_size_of_blocks(monkeypatch):
    expected = covariance_of(classes("kronecker").found.normal, 21)
    monkeypatch.setattr(_around, "_BLOCK_BYTES", 5000)  # some examples at once, not all ten
    again = around(classes_start(), structure="kronecker")
    np.testing.assert_allclose(covariance_of(again.found.normal, 21), expected, atol=1e-12)


def test_the_mode_of_differentiation_reaches_the_curvature():
    expected = covariance_of(classes().found.normal, 21)
    again = around(start(classes_target(), ad.Forward()))
    np.testing.assert_allclose(covariance_of(again.found.normal, 21), expected, atol=1e-12)


# --- unknowns beside the parameters ---


def test_an_unknown_scale_has_the_hessian_of_scipy():
    found = around(linear_target(bayes.Gaussian(dist.Gamma(2.0, 1.0)))).found
    design = LINEAR.design(LINEAR.x)

    def minus_log_density(vector):
        parameters, log_scale = vector[:3], vector[3]
        means = np.tensordot(design, parameters, 1)
        y = LINEAR.y.reshape(-1, *np.ones(means.ndim - 1, int))
        data = stats.norm.logpdf(y, means, np.exp(log_scale)).sum(axis=0)
        prior = stats.norm.logpdf(parameters).sum(axis=0)
        return -(data + prior + stats.gamma.logpdf(np.exp(log_scale), 2.0) + log_scale)

    hessian = differentiate.hessian(minus_log_density, np.asarray(found.mode)).ddf
    np.testing.assert_allclose(covariance_of(found.normal, 4), np.linalg.inv(hessian), rtol=1e-5)


@pytest.mark.filterwarnings("ignore::eqxlike.bayes.InferenceWarning")
@pytest.mark.parametrize("structure", ["full", "kronecker"])
def test_a_hierarchical_prior_has_positive_variances(structure):
    model = nn.MLP(2, "scalar", width_size=3, depth=1, key=jr.key(0), dtype=jnp.float64)
    prior = bayes.normal(0.0, dist.HalfCauchy(1.0))
    target = bayes.Posterior(model, prior, bayes.Gaussian(0.5), (INPUTS, INPUTS[:, 0] ** 2))
    values = np.linalg.eigvalsh(covariance_of(around(target, structure=structure).found.normal, 14))
    assert np.all(np.isfinite(values))
    assert np.all(values > 0)


def test_negative_curvature_counts_by_its_size():
    rotation = np.linalg.qr(np.random.default_rng(0).normal(size=(3, 3)))[0]
    factor = positive_cholesky(jnp.asarray(rotation * np.array([4.0, -2.0, 1.0]) @ rotation.T))
    np.testing.assert_allclose(factor, np.tril(factor))
    assert np.all(np.diag(factor) > 0)
    wanted = rotation * np.array([4.0, 2.0, 1.0]) @ rotation.T
    np.testing.assert_allclose(factor @ factor.T, wanted, rtol=1e-10)


# --- classes ---


def test_linearised_logits_have_the_dense_mean_and_covariance():
    posterior = classes()
    prediction = bayes.predict(posterior, NEW, key=jr.key(2), num_samples=8)
    assert isinstance(prediction, bayes.CategoricalMixture)
    logits = np.asarray(prediction.logits)
    means = jax.vmap(posterior.target.network)(NEW)
    np.testing.assert_allclose(logits.mean(axis=0), means, rtol=1e-6)
    jacobian = jacobian_by_hand(posterior, NEW)
    inverse = np.linalg.inv(precision_by_hand(posterior))
    wanted = np.einsum("nci,ij,ndj->ncd", jacobian, inverse, jacobian)
    centred = logits - logits.mean(axis=0)
    found = np.einsum("snc,snd->ncd", centred, centred) / len(logits)
    np.testing.assert_allclose(found, wanted, rtol=1e-6)


def test_few_draws_of_several_logits_are_plain_ones():
    prediction = bayes.predict(classes(), NEW, key=jr.key(2), num_samples=1)
    assert isinstance(prediction, bayes.CategoricalMixture)
    assert np.all(np.isfinite(prediction.logits))


def test_probit_divides_logits_by_their_spread():
    posterior = predicting(classes(), "probit")
    jacobian = jacobian_by_hand(posterior, NEW)
    inverse = np.linalg.inv(precision_by_hand(posterior))
    variance = np.einsum("nci,ij,ncj->nc", jacobian, inverse, jacobian)
    wanted = jax.vmap(posterior.target.network)(NEW) / np.sqrt(1 + np.pi / 8 * variance)
    prediction = bayes.predict(posterior, NEW, key=jr.key(2), num_samples=2)
    assert isinstance(prediction, bayes.CategoricalMixture)
    expected = np.broadcast_to(wanted, (2, *wanted.shape))
    np.testing.assert_allclose(prediction.logits, expected, rtol=1e-6)


class Slope(eqx.Module):
    weight: jax.Array

    def __call__(self, x):
        return self.weight * x[0]


SLOPES = np.random.default_rng(0).normal(size=(20, 1))
IS_ONE = np.random.default_rng(1).uniform(size=20) < expit(1.5 * SLOPES[:, 0])


def slope_density(weight):
    """One parameter with two classes: everything can be integrated."""
    logits = np.where(IS_ONE, 1, -1) * weight * SLOPES[:, 0]
    return np.exp(np.log(expit(logits)).sum() + stats.norm.logpdf(weight, 0, 2))


@functools.cache
def slope():
    mode = optimize.fmin(lambda weight: -np.log(slope_density(weight)), 1.0, ftol=1e-12, disp=0)
    data = (SLOPES, IS_ONE.astype(int))
    return around(
        bayes.Posterior(
            Slope(jnp.asarray(mode[0])), bayes.normal(0.0, 2.0), bayes.Bernoulli(), data
        )
    )


def test_evidence_of_two_classes_is_near_the_integral():
    integral = integrate.quad(slope_density, -20, 20)[0]
    np.testing.assert_allclose(slope().log_evidence, np.log(integral), atol=0.05)


@pytest.mark.parametrize(("predictive", "atol"), [("linearised", 1e-3), ("probit", 0.02)])
def test_probabilities_of_two_classes_are_integrals(predictive, atol):
    found = slope().found
    spread = float(covariance_of(found.normal, 1)[0, 0]) ** 0.5
    mean = float(found.mode[0])
    new = np.array([[-2.0], [0.3], [4.0]])
    wanted = [
        integrate.quad(lambda w, x=x: expit(w * x) * stats.norm.pdf(w, mean, spread), -15, 20)[0]
        for x in new[:, 0]
    ]
    prediction = bayes.predict(predicting(slope(), predictive), new, key=jr.key(0), num_samples=200)
    assert isinstance(prediction, bayes.CategoricalMixture)
    np.testing.assert_allclose(prediction.probabilities[:, 1], wanted, atol=atol)


def test_sampled_networks_are_those_of_the_draws():
    posterior = predicting(small(), "sampled")
    prediction = bayes.predict(posterior, NEW, key=jr.key(2), num_samples=3)
    assert isinstance(prediction, bayes.Mixture)
    samples = posterior.samples(3, key=jr.split(jr.key(2))[0])
    wanted = jax.vmap(lambda sample: jax.vmap(posterior.model(sample))(NEW))(samples)
    np.testing.assert_allclose(prediction.components.mean, wanted, rtol=1e-10)


# --- the scale of the prior ---


@pytest.mark.parametrize("structure", STRUCTURES)
def test_tuned_scale_has_the_greatest_evidence_of_a_grid(structure):
    posterior = small(structure, tune_prior=True)
    untuned = small(structure)
    precision = precision_by_hand(small())
    num, mode = 13, np.asarray(posterior.found.mode)
    is_parameter = np.arange(14) < num
    scales = np.exp(np.linspace(-3, 3, 6001))

    def log_det(scale):
        matrix = precision + np.diag(is_parameter * (scale**-2 - 1.0))
        if structure == "full":
            return np.linalg.slogdet(matrix)[1]
        if structure == "last_layer":
            return np.linalg.slogdet(matrix[9:, 9:])[1]
        if structure == "diagonal":
            return np.log(np.diag(matrix)).sum()
        blocks = [block_precision(each) for each in untuned.found.normal.blocks]
        added = [np.eye(len(each)) * (scale**-2 - 1.0) for each in blocks]
        added[-1] *= 0  # the scale of the likelihood
        return sum(np.linalg.slogdet(a + b)[1] for a, b in zip(blocks, added, strict=True))

    def log_evidence(scale):
        return stats.norm.logpdf(mode[:num], 0, scale).sum() - log_det(scale) / 2

    values = np.array([log_evidence(scale) for scale in scales])
    best = scales[np.argmax(values)]
    np.testing.assert_allclose(posterior.found.prior_scale, best, rtol=1.01e-3)
    gained = values.max() - log_evidence(1.0)
    np.testing.assert_allclose(posterior.log_evidence - untuned.log_evidence, gained, atol=1e-5)


def test_an_untuned_prior_has_no_scale_found():
    assert linear().found.prior_scale is None


# --- what is refused ---


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"structure": "block"},
            "Laplace: structure must be one of 'full', 'diagonal', 'kronecker', 'last_layer', got "
            "'block'",
        ),
        (
            {"predictive": "mean"},
            "Laplace: predictive must be one of 'linearised', 'probit', 'sampled', got 'mean'",
        ),
        (
            {"layer": "layers[0].*"},
            "layer is for structure=\"last_layer\", and structure is 'full'",
        ),
    ],
)
def test_wrong_words_are_named(fields, message):
    with pytest.raises(ValueError, match=message.replace("[", r"\[").replace("*", r"\*")):
        bayes.Laplace(**fields)


def test_tune_prior_is_a_bool():
    with pytest.raises(TypeError, match=r"tune_prior must be a bool, got 2\.0"):
        bayes.Laplace(tune_prior=2.0)  # pyright: ignore[reportArgumentType]


def test_too_many_unknowns_are_refused_by_their_bytes():
    model = nn.Linear(200, 200, key=jr.key(0), dtype=jnp.float64)
    data = (np.zeros((2, 200)), np.zeros((2, 200)))
    target = bayes.Posterior(model, bayes.normal(), bayes.Gaussian(), data)
    with pytest.raises(
        ValueError,
        match=r"structure='full' would keep 1,616,040,000 numbers, 12\.0 GiB, for 40,200 unknowns; "
        r"at most 4 GiB are taken\. Structures that do: 'kronecker', 'diagonal', 'last_layer'\.",
    ):
        bayes.infer(target, bayes.Laplace(), key=jr.key(0), progress=False)


@pytest.mark.parametrize(
    ("prior", "fields", "message"),
    [
        (
            bayes.normal(),
            {"predictive": "probit"},
            r'predictive="probit" is for classes.*the likelihood is Poisson\. "linearised" serves',
        ),
        (
            dist.Laplace(0.0, 1.0),
            {"tune_prior": True},
            r"tune_prior is for one prior `bayes\.normal\(loc, number\)`.*the prior is Independent",
        ),
        (
            bayes.normal(0.0, dist.HalfCauchy(1.0)),
            {"tune_prior": True},
            r"tune_prior is for one prior `bayes\.normal\(loc, number\)`",
        ),
        (
            bayes.normal(),
            {"structure": "last_layer", "layer": "layers[7].*"},
            r"layer 'layers\[7\]\.\*' matches no parameter\. The parameters are weight, bias\.",
        ),
    ],
    ids=["probit", "prior", "hierarchical prior", "layer"],
)
def test_what_does_not_fit_the_target_is_refused(prior, fields, message):
    model = nn.Linear(2, "scalar", key=jr.key(0), dtype=jnp.float64)
    target = bayes.Posterior(model, prior, bayes.Poisson(), (NEW, np.arange(4)))
    with pytest.raises(ValueError, match=message):
        bayes.infer(target, bayes.Laplace(**fields), key=jr.key(0), progress=False)


def test_one_quantile_is_no_distribution():
    with pytest.raises(ValueError, match="one sample has no variance; take at least 2"):
        bayes.predict(linear(), NEW, key=jr.key(0), num_samples=1)
