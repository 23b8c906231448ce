"""The scores of a prediction on a test part."""

import math
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from benchmarks.quality.data import Split
from eqxlike import bayes

LEVEL = 0.9
"""The level of the intervals and sets whose coverage is measured."""

LEVELS = np.linspace(0.05, 0.95, 19, dtype=np.float32)
NUM_BINS = 10

Prediction = bayes.Mixture | bayes.CategoricalMixture


class Scores(NamedTuple):
    """The scores on a test part.

    - `nll`: negative log likelihood in nats for an example, in the unit of the targets.
    - `accuracy`: RMSE in the unit of the targets, or the fraction of correctly predicted classes.
    - `calibration_error`: between 0 and 1.
    - `coverage`: coverage of intervals or sets of level 0.9.
    """

    nll: float
    accuracy: float
    calibration_error: float
    coverage: float


def scores(prediction: Prediction, split: Split) -> Scores:
    """The scores of a prediction, of standardised targets or of classes."""
    y = jnp.asarray(split.y_test_standard)
    nll = float(bayes.metrics.nll(prediction, y))
    if isinstance(prediction, bayes.Mixture):
        rmse = float(bayes.metrics.rmse(prediction.mean, y)) * split.unit
        covered = bayes.metrics.coverage(y, *prediction.interval(LEVEL))
        calibration_error = interval_calibration_error(prediction, y)
        return Scores(nll + math.log(split.unit), rmse, calibration_error, float(covered))
    probabilities = prediction.probabilities
    return Scores(
        nll,
        float(bayes.metrics.accuracy(probabilities, y)),
        float(bayes.metrics.ece(probabilities, y, NUM_BINS)),
        set_coverage(np.asarray(probabilities, np.float64), np.asarray(y)),
    )


def interval_calibration_error(prediction: bayes.Mixture, y: jnp.ndarray) -> float:
    """The mean difference between coverage and level of central intervals, over many levels."""
    # A central interval of level `p` contains the quantiles within `p / 2` of the median.
    level_of_each = np.abs(2 * np.asarray(prediction.cdf(y)) - 1)
    coverage = np.mean(level_of_each[None] <= LEVELS[:, None], axis=1)
    return float(np.mean(np.abs(coverage - LEVELS)))


def set_coverage(probabilities: np.ndarray, y: np.ndarray) -> float:
    """The coverage of sets of the most probable classes.

    A set contains classes in order of their probability until their sum reaches `LEVEL`. It
    contains the last class randomly, so that its expected probability is exactly `LEVEL`. The
    result is the mean probability that the set contains the label. Without randomness, the sets of
    a confident classifier would have one class, and their coverage would be its accuracy.

    **Arguments:**

    - `probabilities`: shape `(N, C)`.
    - `y`: the labels, shape `(N,)`.
    """
    # Equally probable classes keep their order.
    order = np.argsort(-probabilities, axis=1, kind="stable")
    ordered = np.take_along_axis(probabilities, order, axis=1)
    room = LEVEL - (np.cumsum(ordered, axis=1) - ordered)
    chance = np.clip(room / np.maximum(ordered, np.finfo(np.float64).tiny), 0.0, 1.0)
    return float(np.mean(np.sum(chance, axis=1, where=order == y[:, None])))
