"""Data sets, and their splits into training and test parts."""

import csv
import dataclasses
import functools
import importlib
import pathlib
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

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
