"""The affine map, and the map that does nothing."""

from typing import Any, Literal, TypeVar

import jax.numpy as jnp
from jaxtyping import Array, PRNGKeyArray, Shaped

from .._dtypes import parameter_dtype
from .._module import Module, field
from ._common import (
    Initializer,
    Parameter,
    check_input,
    draw,
    fan_in_limit,
    feature_count,
    feature_shape,
    number_of_features,
)

T = TypeVar("T")


class Linear(Module):
    """The affine map `weight @ x + bias`.

    Weight and bias start uniform on `(-1/sqrt(in_features), 1/sqrt(in_features))`, the fan-in rule
    of LeCun, Bottou, Orr & Müller (1998), "Efficient BackProp", with the constant that PyTorch
    uses.

    >>> import jax, jax.numpy as jnp
    >>> layer = Linear(3, 4, key=jax.random.key(0))
    >>> layer(jnp.ones(3)).shape
    (4,)
    >>> jax.vmap(layer)(jnp.ones((5, 3))).shape
    (5, 4)
    """

    weight: Shaped[Array, "out_size in_size"]
    bias: Shaped[Array, " out_size"] | None
    in_features: int | Literal["scalar"] = field(static=True)
    out_features: int | Literal["scalar"] = field(static=True)
    use_bias: bool = field(static=True)

    def __init__(
        self,
        in_features: int | Literal["scalar"],
        out_features: int | Literal["scalar"],
        use_bias: bool = True,
        dtype: Any = None,
        *,
        weight_init: Initializer | None = None,
        bias_init: Initializer | None = None,
        key: PRNGKeyArray,
    ):
        """**Arguments:**

        - `in_features`: length of the input; `"scalar"` for an input of shape `()`.
        - `out_features`: length of the output; `"scalar"` for an output of shape `()`.
        - `use_bias`: whether to add a bias.
        - `dtype`: of weight and bias, floating or complex; JAX's default float if `None`.
        - `weight_init`, `bias_init`: instead of the uniform draw, one of `jax.nn.initializers` or a
          function of your own, `init(key, shape, dtype)`. For the weight it is called with the
          shape `(in_size, out_size)`, on which JAX's initializers count their fan-in.
        - `key`: for the initial weight and bias.

        **Raises:** `ValueError` for a negative or non-integer size, `TypeError` for an integer
        dtype.
        """
        in_features = number_of_features(in_features, "in_features")
        out_features = number_of_features(out_features, "out_features")
        in_size, out_size = feature_count(in_features), feature_count(out_features)
        dtype = parameter_dtype(dtype)
        limit = fan_in_limit(in_size)
        self.weight, self.bias = draw(
            key,
            Parameter((out_size, in_size), dtype, limit, weight_init, inputs_last=True),
            Parameter((out_size,), dtype, limit, bias_init) if use_bias else None,
        )
        self.in_features = in_features
        self.out_features = out_features
        self.use_bias = use_bias

    def __call__(
        self, x: Shaped[Array, " in_features"], *, key: PRNGKeyArray | None = None
    ) -> Shaped[Array, " out_features"]:
        """**Arguments:**

        - `x`: shape `(in_features,)`, or `()` if `in_features="scalar"`.
        - `key`: ignored; layers share one signature.

        **Returns:** shape `(out_features,)`, or `()` if `out_features="scalar"`.

        **Raises:** `ValueError` if `x` has another shape.
        """
        del key
        check_input(self, x, feature_shape(self.in_features))
        if self.in_features == "scalar":
            x = jnp.reshape(x, (1,))
        y = self.weight @ x
        if self.bias is not None:
            y = y + self.bias
        return jnp.squeeze(y) if self.out_features == "scalar" else y


class Identity(Module):
    """Returns its input; a placeholder where a layer is asked for.

    >>> Identity(64, use_bias=False)("anything")
    'anything'
    """

    def __init__(self, *args: Any, **kwargs: Any):
        """Takes any arguments and ignores them, so that it can stand in for any layer."""
        del args, kwargs

    def __call__(self, x: T, *, key: PRNGKeyArray | None = None) -> T:
        """**Returns:** `x`, of any type, unchanged. `key` is ignored."""
        del key
        return x
