"""What networks drawn from a posterior return, whose layers carry it themselves.

`S` is the number of networks, `B` the number of inputs.
"""

from collections.abc import Callable
from typing import Any, Concatenate, TypeVar

import jax
import jax.random as jr
from jaxtyping import Array, PRNGKeyArray, PyTree, Shaped

from .._numbers import whole_number
from ..nn import sample_posterior

Output = TypeVar("Output")


def predict_samples(
    model: Callable[Concatenate[Any, ...], Output],
    inputs: PyTree[Shaped[Array, "B ..."]],
    *,
    key: PRNGKeyArray,
    num_samples: int,
) -> Output:
    """Outputs of `S` networks drawn from the posterior, each applied to all inputs.

    **Arguments:**

    - `model`: called as `network(input)` on one example, after every `nn.BayesianLayer` in it has
      been replaced by a draw. Put other random layers in inference mode.
    - `inputs`: arrays with leading axis B.
    - `key`: for the draws.
    - `num_samples`: S.

    **Returns:** outputs with leading axes S, B.

    **Raises:** `ValueError` if `num_samples` is not a positive integer.

    >>> import eqxlike as eqx, jax, jax.numpy as jnp
    >>> from eqxlike import nn
    >>> model = nn.BayesianLinear(3, 4, key=jax.random.key(0))
    >>> predict = eqx.filter_jit(predict_samples)
    >>> predict(model, jnp.ones((5, 3)), key=jax.random.key(1), num_samples=10).shape
    (10, 5, 4)
    """

    def one(key: PRNGKeyArray) -> Any:
        network = sample_posterior(model, key)
        return jax.vmap(lambda example: network(example))(inputs)

    return jax.vmap(one)(jr.split(key, whole_number(num_samples, "num_samples")))
