"""A network with the likelihood of its data: Gaussian for a number, categorical for a class."""

from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.scipy.stats import norm
from jaxtyping import Array, Float, PRNGKeyArray

from .._module import Module
from .._transforms import filter_jit
from ..bayes import predict_samples
from ..nn import MLP, BayesianMLP
from ._data import Data
from ._settings import Settings


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
