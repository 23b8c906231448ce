"""The table of methods, with the settings that differ from the defaults.

A new line in the table adds a method to the benchmark.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax
import jax.random as jr

from benchmarks.quality import baselines
from benchmarks.quality.baselines import prior_scale, target
from benchmarks.quality.data import Prediction, Split
from eqxlike import bayes

PLAIN = "plain network"
STOPPED = "plain network, stopped early"
MODE = "MAP"
LAPLACE = "Laplace, default"
RECOMMENDED = "ensemble, recommended"

NUM_DRAWS = 200
"""The number of networks in the mixture of a prediction, except for ensembles."""

LARGE = 1500
"""The number of examples from which chains are shorter."""

METHODS: Mapping[str, bayes.Method] = {
    # The call that docs/bayes.md recommends, for all data.
    RECOMMENDED: bayes.EarlyStoppedEnsemble(members=5),
    MODE: bayes.MAP(),
    "deep ensemble": bayes.DeepEnsemble(members=10),
    "MC dropout": bayes.MCDropout(steps=3000),
    "SWAG": bayes.SWAG(),
    LAPLACE: bayes.Laplace(),
    "Laplace, full": bayes.Laplace(structure="full", width=1.0),
    "Laplace, Kronecker": bayes.Laplace(structure="kronecker", width=1.0),
    "Laplace, diagonal": bayes.Laplace(structure="diagonal", width=1.0),
    "Laplace, last layer": bayes.Laplace(structure="last_layer", width=1.0),
    "mean field": bayes.MeanField(steps=3000),
    "Pathfinder": bayes.Pathfinder(paths=2, path_steps=30, elbo_draws=5, draws=100),
    "SGLD": bayes.SGLD(step_size=1e-2, num_samples=100, num_warmup=1000, thin=20),
    "SGHMC": bayes.SGHMC(step_size=1e-3, num_samples=100, num_warmup=200, thin=2),
    "MCLMC": bayes.MCLMC(num_samples=100, thin=20, num_warmup=1000),
    "HMC": bayes.HMC(num_samples=100, num_warmup=150),
    "NUTS": bayes.NUTS(num_samples=100, num_warmup=150, max_doublings=6),
}

OF_LARGE: Mapping[str, bayes.Method] = {
    "deep ensemble": bayes.DeepEnsemble(members=10, batch_size=128),
    "Laplace, full": bayes.Laplace(structure="full", width=1.0, steps=1000),
    "mean field": bayes.MeanField(steps=4000, batch_size=128),
    "SGLD": bayes.SGLD(step_size=1e-2, num_samples=100, thin=10, num_warmup=1000, batch_size=128),
    "SGHMC": bayes.SGHMC(step_size=1e-3, num_samples=50, num_warmup=100, batch_size=128),
    "MCLMC": bayes.MCLMC(num_samples=100, thin=10, num_warmup=500, chains=2),
    "HMC": bayes.HMC(num_samples=50, num_warmup=60, chains=2, trajectory_steps=16),
    "NUTS": bayes.NUTS(num_samples=30, num_warmup=40, chains=2, max_doublings=5),
}
"""The methods with other settings for data with at least `LARGE` examples."""

QUICK: Mapping[str, bayes.Method] = {
    "MAP": bayes.MAP(steps=500),
    "deep ensemble": bayes.DeepEnsemble(members=3, steps=500),
    "MC dropout": bayes.MCDropout(steps=500),
    "Laplace, last layer": bayes.Laplace(structure="last_layer", width=1.0, steps=500),
}
"""The methods of a quick run, for all data."""


class Row(NamedTuple):
    """A method and the name of its row.

    - `predict`: maps a split and a key to the prediction of the test part.
    """

    name: str
    predict: Callable[[Split, jax.Array], Prediction]


def rows(*, is_quick: bool) -> tuple[Row, ...]:
    """All rows, in the order of the tables."""
    of_scikit_learn = (
        Row("ridge or logistic regression", baselines.linear),
        Row("Gaussian process", baselines.gaussian_process),
    )
    if is_quick:
        ours = (bayesian(name, QUICK, QUICK) for name in QUICK)
    else:
        ours = (bayesian(name, METHODS, OF_LARGE) for name in METHODS)
    plain = Row(PLAIN, baselines.plain_network), Row(STOPPED, baselines.stopped_early)
    return (*plain, *of_scikit_learn, *ours)


def bayesian(
    name: str, usual: Mapping[str, bayes.Method], of_large: Mapping[str, bayes.Method]
) -> Row:
    """The row of a method of `eqxlike.bayes`."""

    def predict(split: Split, key: jax.Array) -> Prediction:
        is_large = len(split.data.x) >= LARGE
        method = of_large.get(name, usual[name]) if is_large else usual[name]
        network_key, infer_key, predict_key = jr.split(key, 3)
        given = target(split, network_key, prior_scale(split))
        posterior = bayes.infer(given, method, key=infer_key, progress=False)
        num = None if isinstance(method, bayes.DeepEnsemble) else NUM_DRAWS
        return bayes.predict(posterior, split.x_test, key=predict_key, num_samples=num)

    return Row(name, predict)
