"""Linear layers whose weights are random: a Gaussian posterior beside a Gaussian prior."""

import functools
import itertools
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import jax.random as jr
from jaxtyping import Array, Float, PRNGKeyArray

from ..._dtypes import parameter_dtype
from ..._module import Module, field
from ..._numbers import check_scale, whole_number
from ..._pytree import tree_at
from ..._transforms import filter_eval_shape
from .._common import (
    Parameter,
    check_input,
    check_instance,
    check_key,
    check_real_floating,
    draw,
    draw_gaussian,
    draw_noise,
    fan_in_limit,
    feature_count,
    feature_shape,
    gaussian_kl,
    number_of_features,
    rho_for,
    scale_of_each,
    split_key,
)
from .._linear import Linear
from ._posterior import BayesianLayer


class BayesianLinear(BayesianLayer):
    """An affine map with independent Gaussian weights: a mean-field variational layer.

    Posterior: each weight is N(m, s^2) with `s = softplus(rho)`. Prior: weights N(0, prior_scale^2
    / in_features), biases N(0, prior_scale^2). Dividing by the fan-in keeps the prior over
    functions the same as the layer gets wider (Neal 1996, "Bayesian Learning for Neural Networks",
    section 2.1): `prior_scale` is the prior standard deviation of an output, without bias, for an
    input whose entries have unit mean square.

    In training the output is sampled, not the weights: for given `x` it is Gaussian with mean `m @
    x` and variance `s^2 @ x^2`, so that one draw per output unit is enough and each example has its
    own. This local reparameterisation trick (Kingma, Salimans & Welling 2015, "Variational Dropout
    and the Local Reparameterization Trick") has a gradient of much lower variance than a weight
    draw shared by a batch. In inference mode the weights are their posterior means; `sample` draws
    a layer whose weights are the same for all inputs, as predictions need.

    >>> import jax, jax.numpy as jnp
    >>> layer = BayesianLinear(3, 4, key=jax.random.key(0))
    >>> layer(jnp.ones(3), key=jax.random.key(1)).shape, layer.kl().shape
    ((4,), ())
    >>> layer.sample(jax.random.key(2))(jnp.ones(3)).shape
    (4,)
    """

    weight_mean: Float[Array, "out_size in_size"]
    weight_rho: Float[Array, "out_size in_size"]
    bias_mean: Float[Array, " out_size"] | None
    bias_rho: Float[Array, " out_size"] | None
    prior_scale: float | Float[Array, ""]
    inference: bool
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
        prior_scale: float | Float[Array, ""] = 1.0,
        posterior_scale: float = 0.1,
        inference: bool = False,
        key: PRNGKeyArray,
    ):
        """**Arguments:**

        - `in_features`: length of the input; `"scalar"` for an input of shape `()`.
        - `out_features`: length of the output; `"scalar"` for an output of shape `()`.
        - `use_bias`: whether to add a bias.
        - `dtype`: of the four parameter arrays, real floating; JAX's default float if `None`.
        - `prior_scale`: sets the prior's standard deviations, see above. A float is a constant; an
          array of shape `()` is a leaf like the others, and an optimiser that sees it learns it.
        - `posterior_scale`: sets the initial standard deviations the same way: `posterior_scale /
          sqrt(in_features)` for weights, `posterior_scale` for biases. Small against the spread of
          the initial means (0.58 in the same unit), so that training starts with signal above
          noise.
        - `inference`: whether calls use the posterior mean.
        - `key`: for the initial means, which are those of a `Linear` from the same key.

        **Raises:** `ValueError` for a wrong size or a scale that is not positive, `TypeError` for a
        dtype that is not real floating.
        """
        in_features = number_of_features(in_features, "in_features")
        out_features = number_of_features(out_features, "out_features")
        in_size, out_size = feature_count(in_features), feature_count(out_features)
        dtype = parameter_dtype(dtype)
        check_real_floating(dtype, "BayesianLinear")
        check_scale(prior_scale, "prior_scale")
        check_scale(posterior_scale, "posterior_scale")
        limit = fan_in_limit(in_size)
        weight_shape, bias_shape = (out_size, in_size), (out_size,)
        self.weight_mean, self.bias_mean = draw(
            key,
            Parameter(weight_shape, dtype, limit),
            Parameter(bias_shape, dtype, limit) if use_bias else None,
        )
        self.weight_rho = rho_for(posterior_scale * limit, weight_shape, dtype)
        self.bias_rho = rho_for(posterior_scale, bias_shape, dtype) if use_bias else None
        self.prior_scale = prior_scale
        self.inference = inference
        self.in_features = in_features
        self.out_features = out_features
        self.use_bias = use_bias

    @classmethod
    def around(
        cls,
        linear: Linear,
        *,
        prior_scale: float | Float[Array, ""] = 1.0,
        posterior_scale: float = 0.1,
        inference: bool = False,
    ) -> "BayesianLinear":
        """**Returns:** the layer whose means are the weights of `linear`; scales as above. If these
        have leading axes, as those of layers that are stored stacked, each layer has a
        `prior_scale` of its own where that is an array.
        """
        check_instance(linear, "BayesianLinear.around")
        # The form of a layer without its initial values, which nobody would read.
        layer = filter_eval_shape(
            cls,
            linear.in_features,
            linear.out_features,
            linear.bias is not None,
            linear.weight.dtype,
            prior_scale=prior_scale,
            posterior_scale=posterior_scale,
            inference=inference,
            key=jr.key(0),
        )
        weight, bias = linear.weight, linear.bias
        limit = fan_in_limit(feature_count(linear.in_features))
        values = {
            "prior_scale": scale_of_each(prior_scale, weight.shape[:-2]),
            "weight_mean": weight,
            "weight_rho": rho_for(posterior_scale * limit, weight.shape, weight.dtype),
        }
        if bias is not None:
            values["bias_mean"] = bias
            values["bias_rho"] = rho_for(posterior_scale, bias.shape, bias.dtype)
        return tree_at(
            lambda layer: [getattr(layer, name) for name in values], layer, list(values.values())
        )

    @property
    def weight_prior_scale(self) -> Float[Array, ""]:
        """Prior standard deviation of each weight, in the dtype of the weights."""
        in_size = feature_count(self.in_features)
        return jnp.asarray(self.prior_scale, self.weight_mean.dtype) * fan_in_limit(in_size)

    @property
    def bias_prior_scale(self) -> Float[Array, ""]:
        """Prior standard deviation of each bias, in the dtype of the weights."""
        return jnp.asarray(self.prior_scale, self.weight_mean.dtype)

    def __call__(
        self, x: Float[Array, " in_features"], *, key: PRNGKeyArray | None = None
    ) -> Float[Array, " out_features"]:
        """**Arguments:**

        - `x`: shape `(in_features,)`, or `()` if `in_features="scalar"`.
        - `key`: for the noise; needed unless in inference mode. Give each example of a batch its
          own.

        **Returns:** shape `(out_features,)`, or `()` if `out_features="scalar"`.

        **Raises:** `ValueError` if `x` has another shape, `RuntimeError` if a key is needed and
        none came.
        """
        check_input(self, x, feature_shape(self.in_features))
        if self.in_features == "scalar":
            x = jnp.reshape(x, (1,))
        y = self.weight_mean @ x
        if self.bias_mean is not None:
            y = y + self.bias_mean
        if not self.inference:
            y = y + self._noise(x, key)
        return jnp.squeeze(y) if self.out_features == "scalar" else y

    def _noise(self, x: Float[Array, " in_size"], key: PRNGKeyArray | None) -> Array:
        key = check_key(key, self)
        variance = jax.nn.softplus(self.weight_rho) ** 2 @ x**2
        if self.bias_rho is not None:
            variance = variance + jax.nn.softplus(self.bias_rho) ** 2
        return draw_noise(key, variance)

    def kl(self) -> Float[Array, ""]:
        """KL(posterior || prior), summed over weights and biases, in closed form.

        A Gaussian N(m, s^2) against N(0, p^2) gives `log(p / s) + (s^2 + m^2) / (2 p^2) - 1/2`.

        **Returns:** shape `()`, at least float32: a sum over many weights loses digits in less.
        """
        kl = gaussian_kl(self.weight_mean, self.weight_rho, self.weight_prior_scale)
        if self.bias_mean is not None and self.bias_rho is not None:
            kl = kl + gaussian_kl(self.bias_mean, self.bias_rho, self.bias_prior_scale)
        return kl

    def sample(self, key: PRNGKeyArray) -> Linear:
        """**Returns:** a `Linear` with weights and biases drawn from the posterior."""
        weight_key, bias_key = jr.split(key)
        # The form of a layer without its initial values, which nobody would read.
        layer = filter_eval_shape(
            Linear, self.in_features, self.out_features, self.use_bias, key=jr.key(0)
        )
        weight = draw_gaussian(weight_key, self.weight_mean, self.weight_rho)
        if self.bias_mean is None or self.bias_rho is None:
            return tree_at(lambda layer: layer.weight, layer, weight)
        bias = draw_gaussian(bias_key, self.bias_mean, self.bias_rho)
        return tree_at(lambda layer: (layer.weight, layer.bias), layer, (weight, bias))


class BayesianMLP(Module):
    """A multi-layer perceptron of `BayesianLinear` layers.

    >>> import jax, jax.numpy as jnp
    >>> model = BayesianMLP(2, 1, width_size=8, depth=1, key=jax.random.key(0))
    >>> model(jnp.ones(2), key=jax.random.key(1)).shape
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
