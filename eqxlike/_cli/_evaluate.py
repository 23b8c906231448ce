"""The quality of predictions on held-out data: of the demo's networks, of baselines, and of methods
of inference.

`S` is the number of networks drawn, `N` the number of test examples, `C` the number of classes.
"""

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jaxtyping import Array, Float, Int

from .. import bayes
from ..bayes import metrics
from ..bayes._libraries import distributions
from ..nn import BayesianMLP, Dropout, Lambda, Sequential
from ._models import Data, Model, Settings, network_outputs, sizes_of

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
    if model.log_noise is not None:
        return evaluate_regression(data, outputs, jnp.exp(model.log_noise))
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
    y = data.test.y * scale + centre
    found, *ends = _scored_numbers(y, means * scale + centre, noise * scale)
    return Intervals(_floats(found), *map(np.asarray, (y, *ends)))


# Jitted, as what follows: each operation would be a program of its own to compile.
@jax.jit
def _scored_numbers(
    y: Float[Array, " N"], means: Float[Array, "S N"], noise: Float[Array, "*S_N"]
) -> tuple[dict[str, Array], Array, Array, Array]:
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
    return found, mean, lower, upper


def evaluate_classification(data: Data, log_probabilities: Float[Array, "N C"]) -> Probabilities:
    """Evaluates log probabilities of classes.

    **Returns:** `accuracy`; `nll` in nats for an example; `ece`, the expected calibration error.
    """
    found, bins = _scored_classes(data.test.y, log_probabilities)
    return Probabilities(_floats(found), {name: np.asarray(each) for name, each in bins.items()})


@jax.jit
def _scored_classes(
    y: Int[Array, " N"], log_probabilities: Float[Array, "N C"]
) -> tuple[dict[str, Array], dict[str, Array]]:
    probabilities = jnp.exp(log_probabilities)
    found = {
        "accuracy": metrics.accuracy(log_probabilities, y),
        "nll": metrics.nll(bayes.CategoricalMixture(log_probabilities[None]), y),
        "ece": metrics.ece(probabilities, y, NUM_BINS),
    }
    return found, metrics.calibration_bins(probabilities, y, NUM_BINS)._asdict()


def _floats(metrics: dict[str, Array]) -> dict[str, float]:
    return {name: float(value) for name, value in metrics.items()}


# --- Baselines that nobody here wrote: scikit-learn's linear models ---


# How much to regularise is chosen by the validation part; the model is then fitted to the whole
# training part, as the plain network is.
ALPHAS = tuple(10.0**power for power in range(-2, 5))
"""The penalties on ridge regression's weights to choose from."""

INVERSE_PENALTIES = tuple(10.0**power for power in range(-2, 2))
"""The inverse penalties on logistic regression's weights to choose from."""


def baseline_name(data: Data) -> str:
    """The name of the baseline of a data set."""
    return "ridge" if data.is_regression else "logistic"


def evaluate_baseline(data: Data) -> Evaluation:
    """Fits the baseline of a data set and evaluates it on the test part."""
    return _ridge(data) if data.is_regression else _logistic(data)


def _ridge(data: Data) -> Evaluation:
    """Ridge regression, as a Gaussian with the variance of its residuals in training."""
    from sklearn.linear_model import Ridge

    model = _fitted(data, Ridge(), {"alpha": ALPHAS}, "neg_mean_squared_error")
    residuals = data.train.y - model.predict(data.train.x)
    degrees_of_freedom = len(residuals) - data.train.x.shape[1] - 1
    noise = np.sqrt(np.sum(residuals**2) / degrees_of_freedom, dtype=np.float32)
    means = model.predict(data.test.x).astype(np.float32)
    return evaluate_regression(data, jnp.asarray(means)[None], jnp.asarray(noise))


def _logistic(data: Data) -> Evaluation:
    """Multinomial logistic regression with an L2 penalty."""
    from sklearn.linear_model import LogisticRegression
    from threadpoolctl import threadpool_limits

    # Of many small products: several threads of BLAS would take a hundred times as long, waiting.
    with threadpool_limits(limits=1):
        linear = LogisticRegression(solver="newton-cg")
        model = _fitted(data, linear, {"C": INVERSE_PENALTIES}, "neg_log_loss")
    log_probabilities = model.predict_log_proba(data.test.x).astype(np.float32)
    return evaluate_classification(data, jnp.asarray(log_probabilities))


def _fitted(data: Data, model: Any, penalties: dict[str, Sequence[float]], scoring: str) -> Any:
    """The model with the penalty that is best on the validation part, fitted to all."""
    from sklearn.model_selection import GridSearchCV

    places, size = np.arange(len(data.train)), len(data.validation_split()[1])
    search = GridSearchCV(model, penalties, scoring=scoring, cv=[(places[size:], places[:size])])
    return search.fit(data.train.x, data.train.y)


# --- Methods of inference next to the ELBO of the Bayesian layers, for `--method` ---


NUM_DRAWS = 200
"""The number of networks of a prediction, except that of an ensemble."""

DROPOUT = 0.1


class Choice(NamedTuple):
    """A method of the demo.

    - `title`: what it is called in tables and pictures.
    - `make`: from the settings of a data set to the method.
    """

    title: str
    make: Callable[[Settings], bayes.Method]


def _choice(title: str, kind: type[bayes.Method], *shared: str, **fields: Any) -> Choice:
    """A method with `fields`, and with the `shared` ones of the settings of a data set."""
    return Choice(
        title, lambda settings: kind(**{name: getattr(settings, name) for name in shared}, **fields)
    )


METHODS: dict[str, Choice] = {
    "map": _choice("MAP", bayes.MAP, "steps"),
    "mean-field": _choice("mean field", bayes.MeanField, "steps", "batch_size"),
    "cold-mean-field": _choice(
        "mean field, KL x 0.002", bayes.MeanField, "steps", "batch_size", kl_weight=0.002
    ),
    "laplace": _choice("Laplace, Kronecker", bayes.Laplace, "steps", structure="kronecker"),
    "last-layer": _choice("Laplace, last layer", bayes.Laplace, "steps", structure="last_layer"),
    "ensemble": _choice("deep ensemble", bayes.DeepEnsemble, "steps", "batch_size", members=10),
    "early-stopped": _choice(
        "early-stopped ensemble", bayes.EarlyStoppedEnsemble, "steps", "batch_size", members=10
    ),
    "mc-dropout": _choice("MC dropout", bayes.MCDropout, "steps"),
    "swag": _choice("SWAG", bayes.SWAG, "steps"),
    "pathfinder": _choice("Pathfinder", bayes.Pathfinder),
    "sgld": _choice("SGLD", bayes.SGLD, "batch_size"),
    "sghmc": _choice("SGHMC", bayes.SGHMC, "batch_size"),
    "mclmc": _choice("MCLMC", bayes.MCLMC, chains=2),
    "hmc": _choice("HMC", bayes.HMC, num_samples=100, num_warmup=150, chains=2),
    "nuts": _choice("NUTS", bayes.NUTS, num_samples=100, num_warmup=150, chains=2, max_doublings=6),
}


def evaluate_method(data: Data, settings: Settings, name: str, *, seed: int) -> Evaluation:
    """Finds the posterior of a network by a method, and evaluates what it predicts.

    The network is the Bayesian one of the demo, with its prior; noise is an unknown too.
    """
    model_key, infer_key, predict_key = jr.split(jr.key(seed), 3)
    method = METHODS[name].make(settings)
    start_s = time.perf_counter()
    print(f"{data.name}: {METHODS[name].title}", flush=True)
    posterior = bayes.infer(_target(data, settings, method, model_key), method, key=infer_key)
    num_samples = None if isinstance(method, bayes.DeepEnsemble) else NUM_DRAWS
    prediction = bayes.predict(
        posterior, jnp.asarray(data.test.x), key=predict_key, num_samples=num_samples
    )
    if isinstance(prediction, bayes.Mixture):
        found = evaluate_regression(data, prediction.components.loc, prediction.components.scale)
    else:
        found = evaluate_classification(data, prediction.log_probabilities)
    found.metrics["seconds"] = time.perf_counter() - start_s
    return found


def _target(
    data: Data, settings: Settings, method: bayes.Method, key: jax.Array
) -> bayes.Posterior:
    is_cold = isinstance(method, bayes.MeanField) and method.kl_weight != 1
    prior_scale = settings.prior_scale if is_cold else settings.wide_prior_scale
    sizes = sizes_of(data, settings)
    model = BayesianMLP(*sizes, jax.nn.silu, prior_scale=prior_scale, key=key)
    if isinstance(method, bayes.MCDropout):
        model = _with_dropout(model)
    likelihood = bayes.Categorical()
    if data.is_regression:
        likelihood = bayes.Gaussian(distributions().HalfNormal(1.0))
    x, y = jnp.asarray(data.train.x), jnp.asarray(data.train.y)
    return bayes.Posterior(model, None, likelihood, (x, y))


def _with_dropout(model: BayesianMLP) -> Sequential:
    """The same network with dropout after each hidden layer."""
    hidden = [
        each
        for layer in model.layers[:-1]
        for each in (layer, Lambda(model.activation), Dropout(DROPOUT))
    ]
    return Sequential([*hidden, model.layers[-1]])
