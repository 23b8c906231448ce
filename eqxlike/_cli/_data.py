"""Real data for the demo: scikit-learn's bundled diabetes and digits, split and standardised.

`N` is the number of examples, `D` the number of features.
"""

import dataclasses
from typing import Literal

import numpy as np
from jaxtyping import Float, Shaped

TEST_FRACTION = 0.3
VALIDATION_FRACTION = 0.25
"""The share of the training part by which the plain network and the baselines choose how far to
train and how much to regularise; they are then trained on the whole training part.
"""

Name = Literal["diabetes", "digits"]


@dataclasses.dataclass(frozen=True)
class Part:
    """Examples: `x` of shape (N, D), `y` of shape (N,), floats or class labels."""

    x: Shaped[np.ndarray, "N D"]
    y: Shaped[np.ndarray, " N"]

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, index: slice) -> "Part":
        return Part(self.x[index], self.y[index])


@dataclasses.dataclass(frozen=True)
class Scaling:
    """The affine map that gives the training part mean 0 and unit scale."""

    mean: Float[np.ndarray, "*D"]
    scale: Float[np.ndarray, "*D"]

    def __call__(self, values: Shaped[np.ndarray, "N *D"]) -> Float[np.ndarray, "N *D"]:
        return ((values - self.mean) / self.scale).astype(np.float32)


@dataclasses.dataclass(frozen=True)
class Data:
    """A data set, ready to train on: standardised, in 32 bits.

    - `name`: the name of the data set.
    - `train`: the training part.
    - `test`: the test part: nothing is fitted to it or chosen by it.
    - `x_scaling`: the scaling of the features.
    - `y_scaling`: the scaling of the target; None for class labels.
    """

    name: Name
    train: Part
    test: Part
    x_scaling: Scaling
    y_scaling: Scaling | None

    @property
    def is_regression(self) -> bool:
        """Whether the target is a number rather than a class."""
        return self.y_scaling is not None

    @property
    def num_classes(self) -> int:
        """The number of classes."""
        return int(self.train.y.max()) + 1

    def validation_split(self) -> tuple[Part, Part]:
        """The training part in two: to fit to, and to choose by."""
        size = round(VALIDATION_FRACTION * len(self.train))
        return self.train[size:], self.train[:size]


def load(name: Name) -> Part:
    """A data set as scikit-learn has it, in its own units."""
    from sklearn import datasets

    if name == "diabetes":
        x, y = datasets.load_diabetes(return_X_y=True, scaled=False)
    else:
        x, y = datasets.load_digits(return_X_y=True)
    return Part(np.asarray(x), np.asarray(y))


def prepare(name: Name, whole: Part, *, seed: int) -> Data:
    """Splits and standardises a data set.

    `seed` decides the shuffle and so the split. Means and scales are those of the training part
    alone. The pixels of the digits share a unit and so one scale: pixels at the rim, which are
    hardly ever inked, are not blown up to the size of the others.
    """
    order = np.random.default_rng(seed).permutation(len(whole))
    size = round(TEST_FRACTION * len(whole))
    test, train = (Part(whole.x[part], whole.y[part]) for part in (order[:size], order[size:]))
    is_regression = name == "diabetes"
    spread = np.std(train.x, axis=0)
    if not is_regression:
        spread = np.full_like(spread, np.sqrt(np.mean(spread**2)))
    x_scaling = Scaling(np.mean(train.x, axis=0), spread)
    y_scaling = Scaling(train.y.mean(0), train.y.std(0)) if is_regression else None

    def scaled(part: Part) -> Part:
        y = part.y.astype(np.int32) if y_scaling is None else y_scaling(part.y)
        return Part(x_scaling(part.x), y)

    return Data(name, scaled(train), scaled(test), x_scaling, y_scaling)


# --- Errors that end a command with one line ---


class CommandError(Exception):
    """The command cannot do what it was asked; its message is one line for the person who asked."""
