"""The network that all methods fit, its prior and its likelihood."""

import functools
import math

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import numpyro.distributions as dist

from benchmarks.quality.data import DataSet, Split, split_at
from benchmarks.quality.scores import scores
from eqxlike import bayes, nn

WIDTH = 50
DROPOUT = 0.1
PRIOR_SCALES = (0.5, 1.0, 2.0, 4.0, 8.0)
"""The scales of the prior to choose from. Standardised targets are about 1, and the logits of
confident classes are larger.
"""

NUM_PARTS = 3
"""The number of folds of the training part that choose the scale of the prior."""


def network(data: DataSet, key: jax.Array) -> nn.Sequential:
    """A network with a hidden layer of 50 units and ReLU. Only MC dropout drops units.

    It returns a number, the logit of the second of two classes, or a logit for each class.
    """
    hidden_key, output_key = jr.split(key)
    num_classes = data.num_classes or 1
    return nn.Sequential(
        [
            nn.Linear(data.x.shape[1], WIDTH, key=hidden_key),
            nn.Lambda(jax.nn.relu),
            nn.Dropout(DROPOUT),
            nn.Linear(WIDTH, num_classes if num_classes > 2 else "scalar", key=output_key),
        ]
    )


def likelihood(data: DataSet) -> bayes.Likelihood:
    """The likelihood of standardised targets or of classes."""
    if data.is_regression:
        return bayes.Gaussian(scale=dist.Gamma(2.0, 4.0))
    return bayes.Bernoulli() if data.num_classes == 2 else bayes.Categorical()


def prior(data: DataSet, scale: float) -> bayes.Prior:
    """A normal prior. Biases have this scale. Weights have this scale divided by the square root of
    the number of inputs of the layer.

    Functions drawn from the prior vary about as much for any number of features.
    """
    # The scales are arrays, so that all scales share one program.
    features, hidden, biases = jnp.asarray(
        [scale / math.sqrt(data.x.shape[1]), scale / math.sqrt(WIDTH), scale], jnp.float32
    )
    return bayes.prior_by_path(
        {
            "layers[0].weight": dist.Normal(0.0, features),
            "layers[3].weight": dist.Normal(0.0, hidden),
            "**": dist.Normal(0.0, biases),
        }
    )


@functools.cache
def prior_scale(split: Split) -> float:
    """The scale for which `bayes.MAP` best predicts held-out folds of the training part.

    The test part is not used. All methods use this scale.
    """
    held_out = [split.train[index::NUM_PARTS] for index in range(NUM_PARTS)]
    parts = [
        split_at(split.data, held, np.setdiff1d(split.train, held, assume_unique=True))
        for held in held_out
    ]

    def nll(scale: float) -> float:
        return float(np.mean([_nll_of_map(part, scale) for part in parts]))

    return min(PRIOR_SCALES, key=nll)


def _nll_of_map(split: Split, scale: float) -> float:
    network_key, infer_key, predict_key = jr.split(jr.key(0), 3)
    given = target(split, network_key, scale)
    posterior = bayes.infer(given, bayes.MAP(), key=infer_key, progress=False)
    prediction = bayes.predict(posterior, split.x_test, key=predict_key, num_samples=1)
    return scores(prediction, split).nll


def target(split: Split, key: jax.Array, scale: float) -> bayes.Posterior:
    """The posterior of the network given the training part, with a prior of this scale."""
    data = split.data
    given = network(data, key), prior(data, scale), likelihood(data)
    return bayes.Posterior(*given, (split.x, split.y))
