"""Data sets, how they are split into training and test parts, and the quality of predictions."""

import csv
import dataclasses
import functools
import importlib
import math
import pathlib
from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from eqxlike import bayes

TEST_PART = 0.1


@dataclasses.dataclass(frozen=True, eq=False)
class DataSet:
    """A data set.

    - `name`: the name of the data.
    - `x`: the features, shape `(N, d)`.
    - `y`: the targets, shape `(N,)`: numbers, or classes starting from 0.
    - `num_classes`: the number of classes, or `None` for regression.
    """

    name: str
    x: np.ndarray
    y: np.ndarray
    num_classes: int | None

    @property
    def is_regression(self) -> bool:
        """Whether the targets are numbers."""
        return self.num_classes is None


@dataclasses.dataclass(frozen=True, eq=False)
class Split:
    """A training and a test part.

    - `x`, `y`: the training part. Features, and the targets of a regression, have mean 0 and
      standard deviation 1.
    - `x_test`: features, standardised with the mean and standard deviation of the training part.
    - `y_test`: targets in their original unit.
    - `centre`, `unit`: the original target is `unit` times the standardised target, plus `centre`.
    - `train`: the indices of the training examples.
    """

    data: DataSet
    x: np.ndarray
    y: np.ndarray
    x_test: np.ndarray
    y_test: np.ndarray
    centre: float
    unit: float
    train: np.ndarray

    @property
    def y_test_standard(self) -> np.ndarray:
        """The targets of the test part, standardised like the training targets."""
        if not self.data.is_regression:
            return self.y_test
        return ((self.y_test - self.centre) / self.unit).astype(np.float32)


@functools.cache
def split(data: DataSet, seed: int) -> Split:
    """Random training and test parts with nine tenths and a tenth of the examples."""
    order = np.random.default_rng(seed).permutation(len(data.x))
    num_test = max(1, round(TEST_PART * len(order)))
    return split_at(data, order[:num_test], order[num_test:])


def split_at(data: DataSet, test: np.ndarray, train: np.ndarray) -> Split:
    """The split with these indices of test and training examples."""
    mean, spread = data.x[train].mean(axis=0), data.x[train].std(axis=0)
    # A feature that is constant in the training part carries no information.
    spread = np.where(spread > 0, spread, 1.0)
    x, x_test = (((data.x[rows] - mean) / spread).astype(np.float32) for rows in (train, test))
    y, centre, unit = data.y[train], 0.0, 1.0
    if data.is_regression:
        centre, unit = float(y.mean()), float(y.std())
        y = ((y - centre) / unit).astype(np.float32)
    return Split(data, x, y, x_test, data.y[test], centre, unit, train)


# --- sources of the data ---


class Source(NamedTuple):
    """A data set that is read on request."""

    name: str
    load: Callable[[], DataSet]


def _of_scikit_learn(name: str, num_classes: int | None) -> Source:
    def load() -> DataSet:
        datasets = importlib.import_module("sklearn.datasets")
        function = f"load_{name.replace(' ', '_')}"
        x, y = getattr(datasets, function)(return_X_y=True)
        is_regression = num_classes is None
        return DataSet(name, x, y.astype(np.float64 if is_regression else np.int32), num_classes)

    return Source(name, load)


SOURCES = (
    _of_scikit_learn("diabetes", None),
    _of_scikit_learn("breast cancer", 2),
    _of_scikit_learn("wine", 3),
    _of_scikit_learn("digits", 10),
)


def read_csv(path: pathlib.Path) -> DataSet:
    """Reads a regression from a file of numbers, with the target in the last column.

    Skips a first line with names.

    **Raises:** `ValueError` for a value that is not a number, fewer than two columns or twenty
    rows, or rows of different lengths. `OSError` if the file does not exist.
    """
    lines = path.read_text(encoding="utf-8-sig").splitlines()
    separator = next((each for each in ",;\t" if lines and each in lines[0]), None)
    cells = (
        [line.split() for line in lines]
        if separator is None
        else csv.reader(lines, delimiter=separator)
    )
    rows = [row for row in cells if row]
    if rows and not _are_numbers(rows[0]):
        rows = rows[1:]
    widths = {len(row) for row in rows}
    if len(widths) > 1:
        raise ValueError(f"{path}: rows have different lengths, {sorted(widths)}.")
    width = max(widths, default=0)
    if len(rows) < 20 or width < 2:
        raise ValueError(
            f"{path}: expected twenty rows or more of numbers, features and then the target; got "
            f"{len(rows)} rows of {width}."
        )
    for number, row in enumerate(rows, start=1):
        if not _are_numbers(row):
            raise ValueError(
                f"{path}: row {number} of the data contains a value that is not a number: {row}."
            )
    table = np.asarray(rows, np.float64)
    return DataSet(path.stem, table[:, :-1], table[:, -1], None)


def _are_numbers(row: list[str]) -> bool:
    try:
        return bool(np.isfinite(np.asarray(row, np.float64)).all())
    except ValueError:
        return False


# --- the quality of a prediction of a test part ---

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
