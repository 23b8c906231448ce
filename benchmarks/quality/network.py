"""The network that all methods fit, its prior and its likelihood."""

import math

import jax
import jax.random as jr
import numpyro.distributions as dist

from benchmarks.quality.data import DataSet, Split
from eqxlike import bayes, nn

WIDTH = 50
DROPOUT = 0.1
OF_NUMBERS, OF_CLASSES = 1.0, 4.0
"""The scale of the prior. Standardised targets are about 1; the logits of a class that is certain
are several.
"""


def network(data: DataSet, key: jax.Array) -> nn.Sequential:
    """A hidden layer of 50 units with ReLU; MC dropout drops units of it, other methods none.

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
    """Of standardised targets, or of classes."""
    if data.is_regression:
        return bayes.Gaussian(scale=dist.Gamma(2.0, 4.0))
    return bayes.Bernoulli() if data.num_classes == 2 else bayes.Categorical()


def prior(data: DataSet) -> bayes.Prior:
    """Normal: weights have the scale over the root of the inputs of their layer, biases the scale.

    Its draws are functions that vary about as much whatever the number of features.
    """
    num_features = data.x.shape[1]
    scale = OF_NUMBERS if data.is_regression else OF_CLASSES
    return bayes.prior_by_path(
        {
            "layers[0].weight": dist.Normal(0.0, scale / math.sqrt(num_features)),
            "layers[3].weight": dist.Normal(0.0, scale / math.sqrt(WIDTH)),
            "**": dist.Normal(0.0, scale),
        }
    )


def target(split: Split, key: jax.Array) -> bayes.Posterior:
    """The posterior of the network, given the training part."""
    data = split.data
    return bayes.Posterior(network(data, key), prior(data), likelihood(data), (split.x, split.y))
