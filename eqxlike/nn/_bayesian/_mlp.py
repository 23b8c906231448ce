"""Networks of linear layers whose weights are random."""

import functools
import itertools
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.random as jr
from jaxtyping import Array, Float, PRNGKeyArray

from ..._module import Module
from ..._numbers import whole_number
from .._common import number_of_features, split_key
from .._linear import Linear
from ._gaussian_layer import Estimator
from ._linear import BayesianLinear


class BayesianMLP(Module):
    """A multi-layer perceptron of `BayesianLinear` layers.

    >>> import eqxlike as eqx, jax, jax.numpy as jnp
    >>> model = BayesianMLP(2, 1, width_size=8, depth=1, key=jax.random.key(0))
    >>> eqx.filter_jit(model)(jnp.ones(2), key=jax.random.key(1)).shape
    (1,)
    """

    layers: tuple[BayesianLinear | Linear, ...]
    activation: Callable

    def __init__(
        self,
        in_size: int | Literal["scalar"],
        out_size: int | Literal["scalar"],
        width_size: int,
        depth: int,
        activation: Callable = jax.nn.relu,
        dtype: Any = None,
        *,
        prior_scale: float | Float[Array, ""] = 1.0,
        posterior_scale: float = 0.1,
        inference: bool = False,
        estimator: Estimator = "local",
        key: PRNGKeyArray,
    ):
        """**Arguments:** sizes, `depth` and `activation` as for `MLP`, others as for a layer.

        **Raises:** `ValueError` for a negative or non-integer size or depth.
        """
        in_size = number_of_features(in_size, "in_size")
        out_size = number_of_features(out_size, "out_size")
        width_size = whole_number(width_size, "width_size", least=0)
        depth = whole_number(depth, "depth", least=0)
        make = functools.partial(
            BayesianLinear,
            dtype=dtype,
            prior_scale=prior_scale,
            posterior_scale=posterior_scale,
            inference=inference,
            estimator=estimator,
        )
        sizes = itertools.pairwise((in_size, *[width_size] * depth, out_size))
        keys = split_key(key, depth + 1)
        self.layers = tuple(
            make(*pair, key=layer_key) for pair, layer_key in zip(sizes, keys, strict=True)
        )
        self.activation = activation

    def __call__(self, x: Float[Array, " in_size"], *, key: PRNGKeyArray | None = None) -> Array:
        """**Arguments:** `x` of shape `(in_size,)`, and a `key` as for a layer."""
        keys = [None] * len(self.layers) if key is None else jr.split(key, len(self.layers))
        for layer, layer_key in zip(self.layers[:-1], keys[:-1], strict=True):
            x = self.activation(layer(x, key=layer_key))
        return self.layers[-1](x, key=keys[-1])
