"""Bayesian linear layers, convolutions and MLPs, with Gaussian posterior and prior."""

import functools
import itertools
import math
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.random as jr
from jaxtyping import Array, Float, PRNGKeyArray

from ... import Module, field, filter_eval_shape, tree_at
from ..._check_numbers import whole_number
from ..._dtypes import parameter_dtype
from ..._module import freeze_where
from ..._pytree import frozen_mask
from .._conv import Conv
from .._inputs import (
    axis_names,
    check_input,
    check_instance,
    feature_count,
    feature_shape,
    number_of_features,
)
from .._linear import Linear
from .._parameters import Parameter, draw, fan_in_limit, split_key
from ._gaussian_layer import (
    Estimator,
    GaussianLayer,
    SharedKey,
    check_gaussian,
    check_parts,
    rho_for,
    scale_of_each,
    with_arrays,
    with_posterior_scales,
)


class BayesianLinear(GaussianLayer):
    """A linear layer with independent Gaussian weights: a mean-field variational layer.

    Posterior: each weight is N(m, s^2) with `s = softplus(rho)`. Prior: weights N(0, prior_scale^2
    / in_features), biases N(0, prior_scale^2). Dividing by the fan-in makes the prior over
    functions independent of the width (Neal 1996, "Bayesian Learning for Neural Networks", section
    2.1). `prior_scale` is the prior standard deviation of an output, without bias, for an input
    whose mean square is 1.

    `estimator` determines what is drawn in training:

    - `"local"`, the local reparameterisation trick, draws the output instead of the weights. For
      given `x` the output is Gaussian with mean `m @ x` and variance `s^2 @ x^2`, so each example
      needs only one draw per output unit (Kingma, Salimans & Welling 2015, "Variational Dropout and
      the Local Reparameterization Trick"). Of the three estimators, `"local"` has gradients with
      the lowest variance.
    - `"flipout"` draws one perturbation of the weights for the batch. For each example, random
      signs of the rows and columns of the perturbation make the examples uncorrelated (Wen, Vicol,
      Ba, Tran & Grosse 2018, "Flipout: Efficient Pseudo-Independent Weight Perturbations on
      Mini-Batches"). Call `with_perturbation` once per step.
    - `"weights"` draws the weights (Blundell, Cornebise, Kavukcuoglu & Wierstra 2015, "Weight
      Uncertainty in Neural Networks"). The examples of a batch share a draw if they have the same
      key, or if `with_perturbation` was applied to the model. Otherwise all weights are drawn for
      each example.

    In inference mode the weights are the posterior means. `sample` draws a layer with the same
    weights for all inputs, for predictions.

    >>> import eqxlike as eqx, jax, jax.numpy as jnp
    >>> layer = BayesianLinear(3, 4, key=jax.random.key(0))
    >>> output = eqx.filter_jit(layer)(jnp.ones(3), key=jax.random.key(1))
    >>> output.shape, eqx.filter_jit(layer.kl)().shape
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
    shared_key: SharedKey | None
    in_features: int | Literal["scalar"] = field(static=True)
    out_features: int | Literal["scalar"] = field(static=True)
    use_bias: bool = field(static=True)
    estimator: Estimator = field(static=True)

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
        estimator: Estimator = "local",
        key: PRNGKeyArray,
    ):
        """**Arguments:**

        - `in_features`: length of the input; `"scalar"` for an input of shape `()`.
        - `out_features`: length of the output; `"scalar"` for an output of shape `()`.
        - `use_bias`: whether to add a bias.
        - `dtype`: dtype of the parameters, real floating; JAX's default float if `None`.
        - `prior_scale`: scale of the prior, see the class. A float is a constant. An array of shape
          `()` is a parameter, so an optimiser can learn it.
        - `posterior_scale`: scale of the initial posterior: the standard deviations are
          `posterior_scale / sqrt(in_features)` for weights, and `posterior_scale` for biases. The
          default is small, so that noise does not dominate early training. For comparison, the
          initial means have the standard deviation `0.58 / sqrt(in_features)`.
        - `inference`: whether calls use the posterior mean.
        - `estimator`: `"local"`, `"flipout"` or `"weights"`, see the class.
        - `key`: random key for the initial means. The means equal the weights of a `Linear` with
          the same key.

        **Raises:**

        - `ValueError` if a size is invalid.
        - `ValueError` if a scale is not positive.
        - `ValueError` if the estimator is unknown.
        - `TypeError` if the dtype is not real floating.
        """
        in_features = number_of_features(in_features, "in_features")
        out_features = number_of_features(out_features, "out_features")
        in_size, out_size = feature_count(in_features), feature_count(out_features)
        dtype = parameter_dtype(dtype)
        check_gaussian("BayesianLinear", dtype, prior_scale, posterior_scale, estimator)
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
        self.shared_key = None
        self.estimator = estimator
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
        estimator: Estimator = "local",
    ) -> "BayesianLinear":
        """**Returns:** a layer with the weights of `linear` as posterior means. The other arguments
        are as in the constructor.

        If `linear` consists of stacked layers and `prior_scale` is an array, each layer gets its
        own copy of `prior_scale`.
        """
        check_instance(linear, "BayesianLinear.around")
        # Only the structure is needed, not initial values.
        weight, bias = linear.weight, linear.bias
        sizes = linear.in_features, linear.out_features, bias is not None, weight.dtype
        scales = {"prior_scale": prior_scale, "posterior_scale": posterior_scale}
        options = {"inference": inference, "estimator": estimator, "key": jr.key(0)}
        layer = filter_eval_shape(cls, *sizes, **scales, **options)
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

    @classmethod
    def from_parts(
        cls, mean: Linear, scales: Linear, *, estimator: Estimator = "local"
    ) -> "BayesianLinear":
        """Builds a layer from posterior means and standard deviations.

        This is the inverse of `mean_layer` and `posterior_scales`.

        **Arguments:**

        - `mean`: a `Linear` with the posterior means.
        - `scales`: a `Linear` of the same shapes with the posterior standard deviations, which must
          be positive.
        - `estimator`: see the class.

        **Returns:** the layer, with the default prior.

        **Raises:**

        - `TypeError` if an argument is not a `Linear`, or its dtype is not real floating.
        - `ValueError` if the shapes of `mean` and `scales` differ.

        >>> import jax
        >>> layer = BayesianLinear(3, 4, key=jax.random.key(0))
        >>> same = BayesianLinear.from_parts(layer.mean_layer(), layer.posterior_scales())
        >>> bool(abs(same.weight_rho - layer.weight_rho).max() < 1e-5)
        True
        """
        check_parts(mean, scales, Linear)
        return with_posterior_scales(cls.around(mean, estimator=estimator), scales)

    @property
    def _stacked(self) -> tuple[int, ...]:
        return self.weight_mean.shape[:-2]

    @property
    def weight_prior_scale(self) -> Float[Array, ""]:
        """Prior standard deviation of each weight, in the dtype of the weights."""
        return self.bias_prior_scale * fan_in_limit(feature_count(self.in_features))

    def __call__(
        self, x: Float[Array, " in_features"], *, key: PRNGKeyArray | None = None
    ) -> Float[Array, " out_features"]:
        """**Arguments:**

        - `x`: shape `(in_features,)`, or `()` if `in_features="scalar"`.
        - `key`: random key for the noise; required unless the layer is in inference mode. Use a
          different key for each example of a batch.

        **Returns:** shape `(out_features,)`, or `()` if `out_features="scalar"`.

        **Raises:** `ValueError` if `x` has another shape, `RuntimeError` if a required key is
        missing.
        """
        check_input(self, x, feature_shape(self.in_features))
        return self._output(x, key)

    def mean_layer(self) -> Linear:
        """**Returns:** a `Linear` with the posterior means."""
        shell = _linear_without_values(self.in_features, self.out_features, self.use_bias)
        linear = with_arrays(shell, self.weight_mean, self.bias_mean)
        if (mask := frozen_mask(self)) is None:
            return linear
        return freeze_where(linear, with_arrays(linear, mask.weight_mean, mask.bias_mean))


@functools.lru_cache(typed=True)
def _linear_without_values(*sizes: Any) -> Linear:
    """The structure of a `Linear`, without initial values.

    Making the result takes 0.4 ms, and each call of a layer outside of `jax.jit` uses the result
    twice, so it is cached.
    """
    return filter_eval_shape(Linear, *sizes, key=jr.key(0))


class BayesianConv(GaussianLayer):
    """A convolution with independent Gaussian weights: a mean-field variational layer.

    Posterior: each weight is N(m, s^2) with `s = softplus(rho)`. Prior: weights N(0, prior_scale^2
    / fan_in), biases N(0, prior_scale^2), with `fan_in = in_channels / groups * prod(kernel_size)`.
    The scales have the same meaning as in `BayesianLinear`.

    `estimator` determines what is drawn in training, as in `BayesianLinear`:

    - `"local"` draws the output. For given `x` each entry is Gaussian. The mean of the entry is the
      convolution of `x` with `m`, and its variance is the convolution of `x^2` with `s^2` (Kingma,
      Salimans & Welling 2015, "Variational Dropout and the Local Reparameterization Trick"; for
      convolutions Shridhar, Laumann & Liwicki 2019, "A Comprehensive guide to Bayesian
      Convolutional Neural Network with Variational Inference"). Each entry has the correct
      distribution. However, the entries are drawn independently. With random weights, the entries
      of an output would be correlated, because they share the weights.
    - `"flipout"` draws one perturbation of the weights for the batch, and for each example random
      signs of the input and output channels. All positions of an example share its signs (Wen,
      Vicol, Ba, Tran & Grosse 2018). Call `with_perturbation` once per step.
    - `"weights"` draws the weights (Blundell, Cornebise, Kavukcuoglu & Wierstra 2015).

    `sample` draws a layer with the same weights for all inputs, for predictions.

    >>> import eqxlike as eqx, jax, jax.numpy as jnp
    >>> from eqxlike import nn
    >>> layer = BayesianConv(nn.Conv1d(3, 4, kernel_size=2, key=jax.random.key(0)))
    >>> eqx.filter_jit(layer)(jnp.ones((3, 16)), key=jax.random.key(1)).shape
    (4, 15)
    >>> eqx.filter_jit(layer.kl)().shape, type(layer.sample(jax.random.key(2))).__name__
    ((), 'Conv1d')
    """

    mean: Conv
    weight_rho: Float[Array, "out_channels in_channels/groups *kernel_size"]
    bias_rho: Float[Array, "out_channels *ones"] | None
    prior_scale: float | Float[Array, ""]
    inference: bool
    shared_key: SharedKey | None
    estimator: Estimator = field(static=True)

    def __init__(
        self,
        mean: Conv,
        *,
        prior_scale: float | Float[Array, ""] = 1.0,
        posterior_scale: float = 0.1,
        inference: bool = False,
        estimator: Estimator = "local",
    ):
        """**Arguments:**

        - `mean`: convolution with the posterior means, with any number of spatial axes.
        - `prior_scale`: scale of the prior, see the class. A float is a constant. An array of shape
          `()` is a parameter, so an optimiser can learn it.
        - `posterior_scale`: scale of the initial posterior: the standard deviations are
          `posterior_scale / sqrt(fan_in)` for weights, and `posterior_scale` for biases.
        - `inference`: whether calls use the posterior mean.
        - `estimator`: `"local"`, `"flipout"` or `"weights"`, see the class.

        **Raises:**

        - `TypeError` if `mean` is not a `Conv`, or its dtype is not real floating.
        - `ValueError` if a scale is not positive.
        - `ValueError` if the estimator is unknown.
        """
        check_instance(mean, "BayesianConv")
        if not isinstance(mean, Conv):
            raise TypeError(f"mean must be an nn.Conv, got a {type(mean).__name__}.")
        dtype = mean.weight.dtype
        check_gaussian("BayesianConv", dtype, prior_scale, posterior_scale, estimator)
        self.mean = mean
        limit = _weight_limit(mean)
        self.weight_rho = rho_for(posterior_scale * limit, mean.weight.shape, dtype)
        bias = mean.bias
        self.bias_rho = None if bias is None else rho_for(posterior_scale, bias.shape, dtype)
        self.prior_scale = scale_of_each(prior_scale, self._stacked)
        self.inference = inference
        self.shared_key = None
        self.estimator = estimator

    @classmethod
    def from_parts(
        cls, mean: Conv, scales: Conv, *, estimator: Estimator = "local"
    ) -> "BayesianConv":
        """Builds a layer from posterior means and standard deviations.

        This is the inverse of `mean_layer` and `posterior_scales`. Arguments and errors are the
        same as for `BayesianLinear.from_parts`, with `Conv` instead of `Linear`.

        >>> import jax
        >>> from eqxlike import nn
        >>> layer = BayesianConv(nn.Conv1d(3, 4, kernel_size=2, key=jax.random.key(0)))
        >>> same = BayesianConv.from_parts(layer.mean_layer(), layer.posterior_scales())
        >>> bool(abs(same.weight_rho - layer.weight_rho).max() < 1e-5)
        True
        """
        check_parts(mean, scales, Conv)
        return with_posterior_scales(cls(mean, estimator=estimator), scales)

    @property
    def _stacked(self) -> tuple[int, ...]:
        return self.mean.weight.shape[: -(self.mean.num_spatial_dims + 2)]

    @property
    def weight_prior_scale(self) -> Float[Array, ""]:
        """Prior standard deviation of each weight, in the dtype of the weights."""
        return self.bias_prior_scale * _weight_limit(self.mean)

    def __call__(
        self, x: Float[Array, "in_channels *sizes"], *, key: PRNGKeyArray | None = None
    ) -> Float[Array, "out_channels *new_sizes"]:
        """**Arguments:**

        - `x`: shape `(in_channels, dim_1, ..., dim_N)`, as for `Conv`.
        - `key`: random key for the noise; required unless the layer is in inference mode. Use a
          different key for each example of a batch.

        **Returns:** shape `(out_channels, new_dim_1, ..., new_dim_N)`.

        **Raises:** `ValueError` if `x` has another shape, `RuntimeError` if a required key is
        missing.
        """
        check_input(self, x, (self.mean.in_channels, *axis_names(self.mean.num_spatial_dims)))
        return self._output(x, key)

    def mean_layer(self) -> Conv:
        """**Returns:** the convolution with the posterior means."""
        return self.mean


def _weight_limit(conv: Conv) -> float:
    return fan_in_limit(conv.in_channels // conv.groups * math.prod(conv.kernel_size))


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
        """The sizes, `depth` and `activation` are as in `MLP`, and the other arguments as in
        `BayesianLinear`.

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
        """**Arguments:** `x` of shape `(in_size,)`, and a `key` as in `BayesianLinear`."""
        keys = [None] * len(self.layers) if key is None else jr.split(key, len(self.layers))
        for layer, layer_key in zip(self.layers[:-1], keys[:-1], strict=True):
            x = self.activation(layer(x, key=layer_key))
        return self.layers[-1](x, key=keys[-1])
