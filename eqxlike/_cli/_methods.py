"""The demo's methods of inference beside the ELBO of its Bayesian layers, for `--method`."""

import time
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import jax.random as jr

from .. import bayes
from ..bayes._numpyro import distributions
from ..nn import BayesianMLP, Dropout, Lambda, Sequential
from ._data import Data
from ._evaluate import Evaluation, evaluate_classification, evaluate_regression
from ._models import Settings, sizes_of

NUM_DRAWS = 200
"""Of so many networks a prediction is made, but of an ensemble."""

DROPOUT = 0.1


class Choice(NamedTuple):
    """A method of the demo.

    - `title`: what it is called in tables and pictures.
    - `make`: from the settings of a data set to the method.
    """

    title: str
    make: Callable[[Settings], bayes.Method]


METHODS: dict[str, Choice] = {
    "map": Choice("MAP", lambda settings: bayes.MAP(steps=settings.steps)),
    "mean-field": Choice(
        "mean field",
        lambda settings: bayes.MeanField(steps=settings.steps, batch_size=settings.batch_size),
    ),
    "cold-mean-field": Choice(
        "mean field, KL x 0.002",
        lambda settings: bayes.MeanField(
            steps=settings.steps, batch_size=settings.batch_size, kl_weight=0.002
        ),
    ),
    "laplace": Choice(
        "Laplace, Kronecker",
        lambda settings: bayes.Laplace(structure="kronecker", steps=settings.steps),
    ),
    "last-layer": Choice(
        "Laplace, last layer",
        lambda settings: bayes.Laplace(structure="last_layer", steps=settings.steps),
    ),
    "ensemble": Choice(
        "deep ensemble",
        lambda settings: bayes.DeepEnsemble(
            members=10, steps=settings.steps, batch_size=settings.batch_size
        ),
    ),
    "mc-dropout": Choice("MC dropout", lambda settings: bayes.MCDropout(steps=settings.steps)),
    "swag": Choice("SWAG", lambda settings: bayes.SWAG(steps=settings.steps)),
    "pathfinder": Choice("Pathfinder", lambda settings: bayes.Pathfinder()),
    "sgld": Choice("SGLD", lambda settings: bayes.SGLD(batch_size=settings.batch_size)),
    "sghmc": Choice("SGHMC", lambda settings: bayes.SGHMC(batch_size=settings.batch_size)),
    "mclmc": Choice("MCLMC", lambda settings: bayes.MCLMC(chains=2)),
    "hmc": Choice("HMC", lambda settings: bayes.HMC(num_samples=100, num_warmup=150, chains=2)),
    "nuts": Choice(
        "NUTS",
        lambda settings: bayes.NUTS(num_samples=100, num_warmup=150, chains=2, max_doublings=6),
    ),
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
    model = BayesianMLP(
        *sizes_of(data, settings), jax.nn.silu, prior_scale=_prior_scale(settings, method), key=key
    )
    if isinstance(method, bayes.MCDropout):
        model = _with_dropout(model)
    likelihood = (
        bayes.Gaussian(distributions().HalfNormal(1.0))
        if data.is_regression
        else bayes.Categorical()
    )
    x, y = jnp.asarray(data.train.x), jnp.asarray(data.train.y)
    return bayes.Posterior(model, None, likelihood, (x, y))


def _prior_scale(settings: Settings, method: bayes.Method) -> float:
    is_cold = isinstance(method, bayes.MeanField) and method.kl_weight != 1
    return settings.prior_scale if is_cold else settings.wide_prior_scale


def _with_dropout(model: BayesianMLP) -> Sequential:
    """The same network with dropout after each hidden layer."""
    hidden = [
        each
        for layer in model.layers[:-1]
        for each in (layer, Lambda(model.activation), Dropout(DROPOUT))
    ]
    return Sequential([*hidden, model.layers[-1]])
