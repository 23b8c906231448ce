"""A network with the likelihood of its data: Gaussian for a number, categorical for a class."""

import dataclasses
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.scipy.stats import norm
from jaxtyping import Array, Float, PRNGKeyArray

from .._module import Module
from .._transforms import filter_jit
from ..bayes import predict_samples
from ..nn import MLP, BayesianMLP
from ._data import Data, Name

# Settings: what the demo trains, and how.
#
# The numbers were chosen by the validation part of training parts (see `_data`), never by a test
# part. The two networks of a data set have the same architecture.


@dataclasses.dataclass(frozen=True)
class Settings:
    """Architecture and training of the networks for one data set.

    - `width_size`: units in each hidden layer.
    - `depth`: number of hidden layers.
    - `steps`: training steps of the Bayesian network, and the most that the plain one may take.
    - `batch_size`: examples in a minibatch, for the Bayesian network.
    - `learning_rate`: rate of Adam for the Bayesian network, where a cosine decay starts.
    - `prior_scale`: scale of the prior on the weights, see `nn.BayesianLinear`.
    - `wide_prior_scale`: that for the methods of `--method`, which find the whole posterior and not
      one tempered by `kl_weight`.
    - `kl_weight`: weight of the KL in the ELBO. At 1 the ELBO bounds the evidence; below, the
      posterior is tempered, narrower than the model and the data say.
    - `num_samples`: networks drawn from the posterior for a prediction.
    - `plain_batch_size`: examples in a minibatch, for the plain network.
    - `plain_learning_rate`: rate of AdamW for the plain network.
    - `weight_decay`: decay of AdamW, on weights and not on biases.
    - `rounds`: rounds of the dispatch table; 0 for none.
    """

    width_size: int
    depth: int
    steps: int
    batch_size: int
    learning_rate: float
    prior_scale: float
    wide_prior_scale: float
    kl_weight: float
    num_samples: int
    plain_batch_size: int
    plain_learning_rate: float
    weight_decay: float
    rounds: int


SETTINGS: dict[Name, Settings] = {
    "diabetes": Settings(
        width_size=8,
        depth=1,
        steps=2000,
        batch_size=64,
        learning_rate=1e-2,
        prior_scale=1.0,
        wide_prior_scale=1.0,
        kl_weight=1.0,
        num_samples=200,
        plain_batch_size=64,
        plain_learning_rate=3e-3,
        weight_decay=1.0,
        rounds=25,
    ),
    # At a KL weight of 1 the ELBO gives up fitting nine thousand weights to thirteen hundred
    # images: validation NLL 0.08 to 0.1 for any prior scale, against 0.06 here. The posterior that
    # predicts best is a cold one, as Wenzel et al. (2020) found for larger networks, "How Good is
    # the Bayes Posterior in Deep Neural Networks Really?"
    "digits": Settings(
        width_size=128,
        depth=1,
        steps=3000,
        batch_size=256,
        learning_rate=1e-2,
        prior_scale=1.0,
        wide_prior_scale=8.0,
        kl_weight=0.002,
        num_samples=100,
        plain_batch_size=128,
        plain_learning_rate=3e-3,
        weight_decay=0.3,
        rounds=25,
    ),
}

QUICK_STEPS = 200


def settings_for(name: Name, *, steps: int | None, is_quick: bool) -> Settings:
    """The settings of a data set.

    **Arguments:**

    - `name`: the name of the data set.
    - `steps`: the training steps, instead of its own number.
    - `is_quick`: whether to shorten whatever takes time.
    """
    settings = SETTINGS[name]
    if is_quick:
        # The columns of the table take as long to compile as all else: one data set has it.
        rounds = 5 if name == "diabetes" else 0
        settings = dataclasses.replace(settings, steps=QUICK_STEPS, rounds=rounds)
    if steps is not None:
        settings = dataclasses.replace(settings, steps=steps)
    return settings


class Example(NamedTuple):
    """Features `x` of shape (D,) and the target `y` of shape (); or a batch of them."""

    x: Any
    y: Any


class Regressor(Module):
    """`y ~ N(network(x), exp(log_noise)^2)`: the noise is learnt, one number for all inputs.

    >>> import jax, jax.numpy as jnp
    >>> network = MLP(2, "scalar", width_size=8, depth=1, key=jax.random.key(0))
    >>> model = Regressor(network, jnp.zeros(()))
    >>> model.log_likelihood(Example(jnp.ones(2), jnp.array(0.0)), jax.random.key(1)).shape
    ()
    """

    network: BayesianMLP | MLP
    log_noise: Float[Array, ""]

    def log_likelihood(self, example: Example, key: PRNGKeyArray) -> Float[Array, ""]:
        mean = self.network(example.x, key=key)
        return norm.logpdf(example.y, mean, jnp.exp(self.log_noise))


class Classifier(Module):
    """`y ~ Categorical(softmax(network(x)))`.

    >>> import jax, jax.numpy as jnp
    >>> model = Classifier(MLP(2, 3, width_size=8, depth=1, key=jax.random.key(0)))
    >>> model.log_likelihood(Example(jnp.ones(2), jnp.array(1)), jax.random.key(1)).shape
    ()
    """

    network: BayesianMLP | MLP

    def log_likelihood(self, example: Example, key: PRNGKeyArray) -> Float[Array, ""]:
        logits = self.network(example.x, key=key)
        return jax.nn.log_softmax(logits)[example.y]


Model = Regressor | Classifier


def bayesian_model(data: Data, settings: Settings, *, key: PRNGKeyArray) -> Model:
    """The model of `data` over a Bayesian MLP."""
    sizes = sizes_of(data, settings)
    network = BayesianMLP(*sizes, jax.nn.silu, prior_scale=settings.prior_scale, key=key)
    return _with_likelihood(data, network)


def plain_model(data: Data, settings: Settings, *, key: PRNGKeyArray) -> Model:
    """The model of `data` over a plain MLP of the same architecture."""
    return _with_likelihood(data, MLP(*sizes_of(data, settings), jax.nn.silu, key=key))


def sizes_of(data: Data, settings: Settings) -> tuple[int, int | Literal["scalar"], int, int]:
    """The sizes of the networks: input, output, width and depth."""
    out_size = "scalar" if data.is_regression else data.num_classes
    return data.train.x.shape[1], out_size, settings.width_size, settings.depth


def _with_likelihood(data: Data, network: BayesianMLP | MLP) -> Model:
    if data.is_regression:
        # The noise starts as exp(0): the target is standardised, and at first all of it is noise.
        return Regressor(network, jnp.zeros(()))
    return Classifier(network)


@filter_jit
def network_outputs(
    network: BayesianMLP | MLP, x: Float[Array, "N D"], key: PRNGKeyArray, num_samples: int
) -> Float[Array, "S N ..."]:
    """The outputs of `num_samples` networks drawn from the posterior.

    A plain network is its own only draw: ask it for one.
    """
    return predict_samples(network, x, key=key, num_samples=num_samples)
