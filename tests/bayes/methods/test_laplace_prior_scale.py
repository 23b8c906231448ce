"""The scale of the prior that Laplace chooses."""

import jax
import numpy as np
import pytest
from scipy import stats

from tests.bayes.methods.laplace import (
    STRUCTURES,
    block_precision,
    linear,
    precision_by_hand,
    small,
)


@pytest.fixture(autouse=True, scope="module")
def double_precision():
    with jax.enable_x64(True):
        yield


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
