"""The evidence lower bound on a minibatch."""

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import jax.random as jr
from jaxtyping import Array, Float, PRNGKeyArray

from .._dtypes import wider
from .._numbers import whole_number
from ..nn import kl_divergence, with_perturbation
from ._data import num_examples

Model = TypeVar("Model", bound=Any)
Batch = TypeVar("Batch", bound=Any)


def negative_elbo(
    model: Model,
    log_likelihood: Callable[[Model, Batch, PRNGKeyArray], Float[Array, ""]],
    batch: Batch,
    *,
    num_data: int,
    key: PRNGKeyArray,
    kl_weight: float | Float[Array, ""] = 1.0,
    num_samples: int = 1,
    per_example: bool = False,
) -> Float[Array, ""]:
    """An unbiased estimate of the negative evidence lower bound, from a minibatch.

    For data of N examples, of which the batch holds B, and S draws for each example:

        -ELBO ~ kl_weight * KL(q || p) - N / (B S) sum_{b, s} log p(y_b | x_b, w_bs),   w_bs ~ q

    Graves (2011), "Practical Variational Inference for Neural Networks"; Blundell, Cornebise,
    Kavukcuoglu & Wierstra (2015), "Weight Uncertainty in Neural Networks". The factor N / B makes
    the batch stand for the data set, so that the KL counts once for N examples. Examples get keys
    of their own, so that their noise is independent and its average over the batch small (Kingma,
    Salimans & Welling 2015). In each of the S draws they share what `nn.with_perturbation` says.

    **Arguments:**

    - `model`: any pytree; the KL is that of the `nn.BayesianLayer`s in it.
    - `log_likelihood`: `log_likelihood(model, example, key)`, the log density of one example, shape
      `()`; `example` is the batch without its leading axis, `key` what `model(x, key=key)` needs.
    - `batch`: arrays with leading axis B.
    - `num_data`: N, the number of examples in the training data.
    - `key`: for the draws.
    - `kl_weight`: below 1 for a tempered posterior or while warming up. Only 1 gives a bound on the
      evidence.
    - `num_samples`: S.
    - `per_example`: divide by N, so that the size of the loss does not depend on that of the data.

    **Returns:** shape `()`.

    **Raises:** `ValueError` if leading lengths differ, if the log likelihood of an example is not
    of shape `()`, or if `num_data` or `num_samples` is not a positive integer.

    >>> import eqxlike as eqx, jax, jax.numpy as jnp
    >>> from eqxlike import nn
    >>> model = nn.BayesianLinear(3, "scalar", key=jax.random.key(0))
    >>> def log_likelihood(model, example, key):
    ...     x, y = example
    ...     return jax.scipy.stats.norm.logpdf(y, model(x, key=key))
    >>> batch = (jnp.ones((5, 3)), jnp.zeros(5))
    >>> loss = eqx.filter_jit(negative_elbo)
    >>> loss(model, log_likelihood, batch, num_data=50, key=jax.random.key(1)).shape
    ()
    """
    num_data = whole_number(num_data, "num_data")
    num_samples = whole_number(num_samples, "num_samples")
    batch_size = num_examples(batch, "negative_elbo")

    def one_draw(shared_key: PRNGKeyArray, keys: PRNGKeyArray) -> Array:
        network = with_perturbation(model, shared_key)
        terms = jax.vmap(functools.partial(log_likelihood, network))(batch, keys)
        if jnp.shape(terms) != (batch_size,):
            raise ValueError(
                "log_likelihood must return shape () for one example, got shape "
                f"{jnp.shape(terms)[1:]}."
            )
        return terms

    shared_keys = jr.split(jr.fold_in(key, 2**32 - 1), num_samples)
    keys = jr.split(key, (num_samples, batch_size))
    log_likelihoods = jax.vmap(one_draw)(shared_keys, keys)
    kl = kl_divergence(model)
    dtype = wider(kl.dtype, log_likelihoods.dtype)
    expected = jnp.mean(log_likelihoods.astype(dtype))
    kl = kl.astype(dtype) * jnp.asarray(kl_weight, dtype)
    return kl / num_data - expected if per_example else kl - num_data * expected
