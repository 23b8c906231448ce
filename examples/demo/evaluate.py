"""Evaluates predictions of the demo's networks, baselines and methods of inference.

`S` is the number of networks drawn, `N` the number of test examples, `C` the number of classes.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import numpyro.distributions as dist
from jaxtyping import Array, Float, Int
from sklearn.linear_model import LogisticRegression, Ridge
from sklearn.model_selection import GridSearchCV
from threadpoolctl import threadpool_limits

from eqxlike import bayes, nn
from eqxlike.bayes import metrics

from .training import Data, Model, Settings, network_outputs, sizes_of

LEVEL, NUM_BINS = 0.9, 10


class Evaluation(NamedTuple):
    """The metrics and plotted data of predictions for the test part.

    - `metrics`: the metrics, by name.
    - `shown`: the data that the pictures show, by name. For regression, they are arrays of shape
      (N,) in the units of the target: the `truth`, the `mean` of the predictive distribution, and
      the ends `lower` and `upper` of the central interval of probability `LEVEL`. For
      classification, they are the fields of a `bayes.metrics.CalibrationBins`.
    """

    metrics: dict[str, Any]
    shown: dict[str, Any]


def evaluate(data: Data, model: Model, *, seed: int, num_samples: int) -> Evaluation:
    """Evaluates a model on the test part.

    **Arguments:**

    - `data`: the data set whose test part is predicted.
    - `model`: a Bayesian or a plain model.
    - `seed`: the seed of the draws.
    - `num_samples`: S, the number of networks; 1 for a plain model.
    """
    key = jr.key(seed)
    outputs = network_outputs(model.network, jnp.asarray(data.test.x), key, num_samples)
    if model.log_noise is not None:
        return evaluate_regression(data, outputs, jnp.exp(model.log_noise))
    return evaluate_classification(data.test.y, bayes.CategoricalMixture(outputs).log_probabilities)


def evaluate_regression(
    data: Data, means: Float[Array, "S N"], noise: Float[Array, "*S_N"]
) -> Evaluation:
    """Evaluates an equal mixture of Gaussians against the target, in the target's units.

    **Arguments:**

    - `data`: the data set whose test part is predicted.
    - `means`: the means of the Gaussians, for the standardised target.
    - `noise`: the standard deviations of the Gaussians, for the standardised target: one number for
      all Gaussians, or one for each Gaussian.

    **Returns:** `rmse` in units of the target; `nll` in nats per example, of the density in these
    units; `coverage` of the intervals of probability `LEVEL`, and their mean `width`; `noise`.
    """
    y, means = (each * data.scale + data.centre for each in (data.test.y, means))
    return _scored(y, means, noise * data.scale)


# Jitted like the rest: otherwise each operation is compiled as a separate program.
@jax.jit
def _scored(
    y: Float[Array, " N"], means: Float[Array, "S N"], noise: Float[Array, "*S_N"]
) -> Evaluation:
    mixture = bayes.Mixture(dist.Normal(means, noise))
    mean = mixture.mean
    lower, upper = mixture.interval(LEVEL)
    found = {
        "rmse": metrics.rmse(mean, y),
        "nll": metrics.nll(mixture, y),
        "coverage": metrics.coverage(y, lower, upper),
        "width": metrics.sharpness(lower, upper),
        "noise": jnp.mean(noise),
    }
    return Evaluation(found, {"truth": y, "mean": mean, "lower": lower, "upper": upper})


@jax.jit
def evaluate_classification(
    y: Int[Array, " N"], log_probabilities: Float[Array, "N C"]
) -> Evaluation:
    """Evaluates log probabilities of classes.

    **Returns:** `accuracy`; `nll` in nats per example; `ece`, the expected calibration error.
    """
    probabilities = jnp.exp(log_probabilities)
    found = {
        "accuracy": metrics.accuracy(log_probabilities, y),
        "nll": metrics.nll(bayes.CategoricalMixture(log_probabilities[None]), y),
        "ece": metrics.ece(probabilities, y, NUM_BINS),
    }
    return Evaluation(found, metrics.calibration_bins(probabilities, y, NUM_BINS)._asdict())


# --- Baselines: scikit-learn's linear models ---


# The validation part chooses the penalty. Then the model is fitted to the whole training part, like
# the plain network.
ALPHAS = tuple(10.0**power for power in range(-2, 5))
"""The candidate penalties on the weights of ridge regression."""

INVERSE_PENALTIES = tuple(10.0**power for power in range(-2, 2))
"""The candidate inverse penalties on the weights of logistic regression."""


def evaluate_ridge(data: Data) -> Evaluation:
    """Ridge regression, as a Gaussian with the variance of its residuals in training."""
    model = _fitted(data, Ridge(), {"alpha": ALPHAS}, "neg_mean_squared_error")
    residuals = data.train.y - model.predict(data.train.x)
    degrees_of_freedom = len(residuals) - data.train.x.shape[1] - 1
    noise = np.sqrt(np.sum(residuals**2) / degrees_of_freedom, dtype=np.float32)
    means = model.predict(data.test.x).astype(np.float32)
    return evaluate_regression(data, jnp.asarray(means)[None], jnp.asarray(noise))


def evaluate_logistic(data: Data) -> Evaluation:
    """Multinomial logistic regression with an L2 penalty."""
    # Logistic regression makes many small products, which take 100 times as long with several BLAS
    # threads.
    with threadpool_limits(limits=1):
        linear = LogisticRegression(solver="newton-cg")
        model = _fitted(data, linear, {"C": INVERSE_PENALTIES}, "neg_log_loss")
    log_probabilities = model.predict_log_proba(data.test.x).astype(np.float32)
    return evaluate_classification(data.test.y, jnp.asarray(log_probabilities))


def _fitted(data: Data, model: Any, penalties: dict[str, Sequence[float]], scoring: str) -> Any:
    """The model with the best penalty on the validation part, fitted to the whole training part."""
    places, size = np.arange(len(data.train.y)), len(data.validation_split()[1].y)
    search = GridSearchCV(model, penalties, scoring=scoring, cv=[(places[size:], places[:size])])
    return search.fit(data.train.x, data.train.y)


# --- Methods of inference next to the ELBO of the Bayesian layers, for `--method` ---


NUM_DRAWS = 200
"""The number of networks drawn for a prediction. An ensemble uses its members instead."""

DROPOUT = 0.1


Make = Callable[[Settings], bayes.Method]


def _with(kind: Callable[..., bayes.Method], *shared: str, **fields: Any) -> Make:
    """A function of settings that makes a method with `fields` and with the `shared` settings."""
    return lambda settings: kind(**{name: getattr(settings, name) for name in shared}, **fields)


TRAINED = "steps", "batch_size"
METHODS: dict[str, tuple[str, Make]] = {
    "map": ("MAP", _with(bayes.MAP, "steps")),
    "mean-field": ("mean field", _with(bayes.MeanField, *TRAINED)),
    "cold-mean-field": (
        "mean field, KL x 0.002",
        _with(bayes.MeanField, *TRAINED, kl_weight=0.002),
    ),
    "laplace": ("Laplace, Kronecker", _with(bayes.Laplace, "steps", structure="kronecker")),
    "last-layer": ("Laplace, last layer", _with(bayes.Laplace, "steps", structure="last_layer")),
    "ensemble": ("deep ensemble", _with(bayes.DeepEnsemble, *TRAINED, members=10)),
    "early-stopped": (
        "early-stopped ensemble",
        _with(bayes.EarlyStoppedEnsemble, *TRAINED, members=10),
    ),
    "mc-dropout": ("MC dropout", _with(bayes.MCDropout, "steps")),
    "swag": ("SWAG", _with(bayes.SWAG, "steps")),
    "pathfinder": ("Pathfinder", _with(bayes.Pathfinder)),
    "sgld": ("SGLD", _with(bayes.SGLD, "batch_size")),
    "sghmc": ("SGHMC", _with(bayes.SGHMC, "batch_size")),
    "mclmc": ("MCLMC", _with(bayes.MCLMC, chains=2)),
    "hmc": ("HMC", _with(bayes.HMC, num_samples=100, num_warmup=150, chains=2)),
    "nuts": ("NUTS", _with(bayes.NUTS, num_samples=100, num_warmup=150, chains=2, max_doublings=6)),
}
"""The methods of the demo: their titles in tables and pictures, and how to make them."""


def evaluate_method(data: Data, settings: Settings, name: str, *, seed: int) -> Evaluation:
    """Infers the posterior of a network with a method, and evaluates its predictions.

    The network is the demo's Bayesian network with its prior. The noise is also inferred.
    """
    model_key, infer_key, predict_key = jr.split(jr.key(seed), 3)
    title, make = METHODS[name]
    method, start_s = make(settings), time.perf_counter()
    print(f"{data.name}: {title}", flush=True)
    posterior = bayes.infer(_target(data, settings, method, model_key), method, key=infer_key)
    num_samples = None if isinstance(method, bayes.DeepEnsemble) else NUM_DRAWS
    prediction = bayes.predict(
        posterior, jnp.asarray(data.test.x), key=predict_key, num_samples=num_samples
    )
    if isinstance(prediction, bayes.Mixture):
        normals: Any = prediction.components
        found = evaluate_regression(data, normals.loc, normals.scale)
    else:
        found = evaluate_classification(data.test.y, prediction.log_probabilities)
    found.metrics["seconds"] = time.perf_counter() - start_s
    return found


def _target(
    data: Data, settings: Settings, method: bayes.Method, key: jax.Array
) -> bayes.Posterior:
    is_cold = isinstance(method, bayes.MeanField) and method.kl_weight != 1
    prior_scale = settings.prior_scale if is_cold else settings.wide_prior_scale
    sizes = sizes_of(data, settings)
    model = nn.BayesianMLP(*sizes, jax.nn.silu, prior_scale=prior_scale, key=key)
    if isinstance(method, bayes.MCDropout):
        model = _with_dropout(model)
    is_number = data.is_regression
    likelihood = bayes.Gaussian(dist.HalfNormal(1.0)) if is_number else bayes.Categorical()
    x, y = jnp.asarray(data.train.x), jnp.asarray(data.train.y)
    return bayes.Posterior(model, None, likelihood, (x, y))


def _with_dropout(model: nn.BayesianMLP) -> nn.Sequential:
    """The same network with dropout after each hidden layer."""
    *hidden, last = model.layers
    after = nn.Lambda(model.activation), nn.Dropout(DROPOUT)
    return nn.Sequential([*(each for layer in hidden for each in (layer, *after)), last])
