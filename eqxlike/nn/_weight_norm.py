"""A weight as a direction and a length."""

from collections.abc import Callable
from typing import Any, Generic, TypeVar

import jax.numpy as jnp
from jaxtyping import Array, PRNGKeyArray, Shaped

from .._dtypes import at_least_float32
from .._module import Module, field
from .._numbers import integer
from .._pytree import is_array, tree_at
from ._common import check_instance

Layer = TypeVar("Layer", bound=Callable[..., Any])


class WeightNorm(Module, Generic[Layer]):
    """A layer with a weight `v` replaced by `g v / |v|`, so that length and direction of what each
    output is computed with are trained apart.

    Salimans & Kingma (2016), "Weight Normalization: A Simple Reparameterization to Accelerate
    Training of Deep Neural Networks". At first `g = |v|`, and the layer computes what it did. Norms
    are computed in at least float32.

    >>> import jax, jax.numpy as jnp
    >>> from eqxlike import nn
    >>> linear = nn.Linear(3, 4, key=jax.random.key(0))
    >>> layer = WeightNorm(linear)
    >>> layer.g.shape
    (4, 1)
    >>> bool(jnp.allclose(layer(jnp.ones(3)), linear(jnp.ones(3))))
    True
    """

    layer: Layer
    g: Shaped[Array, "..."]
    weight_name: str = field(static=True)
    axis: int | None = field(static=True)

    def __init__(self, layer: Layer, weight_name: str = "weight", axis: int | None = 0):
        """**Arguments:**

        - `layer`: the layer to wrap, called as `layer(x)`.
        - `weight_name`: the attribute of `layer` to normalise, an array.
        - `axis`: norms are over all axes but this one; over all if `None`.

        **Raises:** `AttributeError` if there is no such attribute; `ValueError` if it is no array,
        or has no such axis.
        """
        check_instance(layer, "WeightNorm")
        weight = getattr(layer, weight_name)
        name = f"{type(layer).__name__}.{weight_name}"
        if not is_array(weight):
            raise ValueError(
                f"WeightNorm expected {name} to be an array, got {type(weight).__name__}."
            )
        number = integer(axis)
        if axis is not None and (number is None or not -weight.ndim <= number < weight.ndim):
            raise ValueError(
                f"axis must be None or an axis of {name}, which has shape {weight.shape}; got "
                f"{axis!r}."
            )
        self.layer = layer
        self.weight_name = weight_name
        self.axis = number
        self.g = _norm(weight, axis).astype(weight.dtype)

    def __call__(self, x: Array, *, key: PRNGKeyArray | None = None) -> Array:
        """**Arguments:**

        - `x`: the input of the layer.
        - `key`: ignored; layers share one signature.

        **Returns:** the output of the layer with the weight normalised.
        """
        del key
        weight = getattr(self.layer, self.weight_name)
        norm = _norm(weight, self.axis)
        normalised = weight.astype(norm.dtype) * (self.g.astype(norm.dtype) / norm)
        layer = tree_at(
            lambda layer: getattr(layer, self.weight_name),
            self.layer,
            normalised.astype(weight.dtype),
        )
        return layer(x)


def _norm(weight: Array, axis: int | None) -> Array:
    kept = None if axis is None else axis % weight.ndim
    over = tuple(each for each in range(weight.ndim) if each != kept)
    wide = weight.astype(at_least_float32(weight.dtype))
    return jnp.sqrt(jnp.sum(jnp.abs(wide) ** 2, over, keepdims=True))
