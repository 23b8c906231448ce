"""The quality of predictions on held-out data: metrics, and numbers to draw pictures from.

`S` is the number of networks drawn, `N` the number of test examples, `C` the number of classes.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from .. import bayes
from ..bayes import metrics
from ..bayes._numpyro import distributions
from ._data import Data
from ._models import Classifier, Model, Regressor, network_outputs

LEVEL = 0.9
NUM_BINS = 10


@dataclasses.dataclass(frozen=True)
class Intervals:
    """Predictions of numbers, in the units of the target.

    - `metrics`: the metrics, by name.
    - `truth`: what was to be predicted, shape (N,).
    - `mean`: the mean of the predictive distribution, shape (N,).
    - `lower`: the lower end of its central interval of probability `LEVEL`, shape (N,).
    - `upper`: the upper end, shape (N,).
    """

    metrics: dict[str, float]
    truth: np.ndarray
    mean: np.ndarray
    lower: np.ndarray
    upper: np.ndarray


@dataclasses.dataclass(frozen=True)
class Probabilities:
    """Predictions of classes.

    - `metrics`: the metrics, by name.
    - `bins`: the predictions by their confidence, the fields of a `bayes.CalibrationBins`.
    """

    metrics: dict[str, float]
    bins: dict[str, np.ndarray]


Evaluation = Intervals | Probabilities


def evaluate(data: Data, model: Model, *, seed: int, num_samples: int) -> Evaluation:
    """Evaluates a model on the test part.

    **Arguments:**

    - `data`: the data set whose test part is predicted.
    - `model`: a Bayesian or a plain model.
    - `seed`: the seed of the draws.
    - `num_samples`: S; 1 for a plain model, whose network is its own only draw.
    """
    key = jax.random.key(seed)
    outputs = network_outputs(model.network, jnp.asarray(data.test.x), key, num_samples)
    if isinstance(model, Regressor):
        return evaluate_regression(data, outputs, jnp.exp(model.log_noise))
    assert isinstance(model, Classifier)
    return evaluate_classification(data, bayes.CategoricalMixture(outputs).log_probabilities)


def evaluate_regression(
    data: Data, means: Float[Array, "S N"], noise: Float[Array, "*S_N"]
) -> Intervals:
    """Evaluates an equal mixture of Gaussians against the target, both in its own units.

    **Arguments:**

    - `data`: the data set whose test part is predicted.
    - `means`: the means of the Gaussians, for the standardised target.
    - `noise`: their standard deviations, likewise: one, or one each.

    **Returns:** `rmse` in units of the target; `nll` in nats for an example, of the density in
    those units; `coverage` of the intervals of probability `LEVEL`, and their mean `width`;
    `noise`.
    """
    assert data.y_scaling is not None
    centre, scale = float(data.y_scaling.mean), float(data.y_scaling.scale)
    y = jnp.asarray(data.test.y) * scale + centre
    means, noise = means * scale + centre, noise * scale
    mixture = bayes.Mixture(distributions().Normal(means, noise))
    mean = mixture.mean
    lower, upper = mixture.interval(LEVEL)
    found = {
        "rmse": metrics.rmse(y, mean),
        "nll": metrics.nll(mixture, y),
        "coverage": metrics.coverage(y, lower, upper),
        "width": metrics.sharpness(lower, upper),
        "noise": jnp.mean(noise),
    }
    return Intervals(_floats(found), *map(np.asarray, (y, mean, lower, upper)))


def evaluate_classification(data: Data, log_probabilities: Float[Array, "N C"]) -> Probabilities:
    """Evaluates log probabilities of classes.

    **Returns:** `accuracy`; `nll` in nats for an example; `ece`, the expected calibration error.
    """
    y, probabilities = jnp.asarray(data.test.y), jnp.exp(log_probabilities)
    found = {
        "accuracy": metrics.accuracy(log_probabilities, y),
        "nll": metrics.nll(bayes.CategoricalMixture(log_probabilities[None]), y),
        "ece": metrics.ece(probabilities, y, NUM_BINS),
    }
    bins = metrics.calibration_bins(probabilities, y, NUM_BINS)._asdict()
    return Probabilities(_floats(found), {name: np.asarray(each) for name, each in bins.items()})


def _floats(metrics: dict[str, Array]) -> dict[str, float]:
    return {name: float(value) for name, value in metrics.items()}
