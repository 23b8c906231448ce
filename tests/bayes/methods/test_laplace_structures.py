"""Each structure of Laplace beside the dense matrix."""

import functools

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import numpyro.distributions as dist
import pytest
from scipy import differentiate, stats

import eqxlike as eqx
from eqxlike import ad, bayes, nn
from eqxlike.bayes._curvature import _around
from eqxlike.bayes._curvature._positive import positive_cholesky
from tests.bayes.methods.laplace import (
    INPUTS,
    LINEAR,
    STRUCTURES,
    around,
    block_precision,
    classes,
    classes_start,
    classes_target,
    covariance_of,
    jacobian_by_hand,
    linear_target,
    precision_by_hand,
    run_in_place,
    small,
)


@pytest.fixture(autouse=True, scope="module")
def double_precision():
    with jax.enable_x64(True):
        yield


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
    again = around(run_in_place(classes_target(), ad.Forward()))
    np.testing.assert_allclose(covariance_of(again.found.normal, 21), expected, atol=1e-12)


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
