"""Convolutions whose weights are random: a Gaussian posterior beside a Gaussian prior."""

import math

import jax
import jax.numpy as jnp
import jax.random as jr
from jaxtyping import Array, Float, PRNGKeyArray

from ..._numbers import check_scale
from ..._pytree import tree_at
from .._common import (
    check_instance,
    check_key,
    check_real_floating,
    draw_gaussian,
    draw_noise,
    fan_in_limit,
    gaussian_kl,
    rho_for,
    scale_of_each,
)
from .._conv import Conv
from ._posterior import BayesianLayer


class BayesianConv(BayesianLayer):
    """A convolution with independent Gaussian weights: a mean-field variational layer.

    Posterior: each weight is N(m, s^2) with `s = softplus(rho)`. Prior: weights N(0, prior_scale^2
    / fan_in), biases N(0, prior_scale^2), with `fan_in = in_channels / groups * (points of the
    kernel)`: the scales mean what they do for `BayesianLinear`.

    In training the output is sampled, not the weights: for given `x` each entry is Gaussian, with
    the convolution of `x` by `m` as its mean and that of `x^2` by `s^2` as its variance (Kingma,
    Salimans & Welling 2015, "Variational Dropout and the Local Reparameterization Trick"; for
    convolutions Shridhar, Laumann & Liwicki 2019, "A Comprehensive guide to Bayesian Convolutional
    Neural Network with Variational Inference"). Each entry has the distribution that random weights
    give it, and is drawn by itself; under weights that are shared by all places, entries of one
    output would be correlated. `sample` draws such weights, as predictions need.

    >>> import jax, jax.numpy as jnp
    >>> from eqxlike import nn
    >>> layer = BayesianConv(nn.Conv2d(3, 8, kernel_size=3, key=jax.random.key(0)))
    >>> layer(jnp.ones((3, 16, 16)), key=jax.random.key(1)).shape, layer.kl().shape
    ((8, 14, 14), ())
    >>> type(layer.sample(jax.random.key(2))).__name__
    'Conv2d'
    """

    mean: Conv
    weight_rho: Float[Array, "out_channels in_channels/groups *kernel_size"]
    bias_rho: Float[Array, "out_channels *ones"] | None
    prior_scale: float | Float[Array, ""]
    inference: bool

    def __init__(
        self,
        mean: Conv,
        *,
        prior_scale: float | Float[Array, ""] = 1.0,
        posterior_scale: float = 0.1,
        inference: bool = False,
    ):
        """**Arguments:**

        - `mean`: the convolution by the posterior means, of any number of spatial axes.
        - `prior_scale`: sets the prior's standard deviations, see above. A float is a constant; an
          array of shape `()` is a leaf like the others, and an optimiser that sees it learns it.
        - `posterior_scale`: sets the initial standard deviations the same way: `posterior_scale /
          sqrt(fan_in)` for weights, `posterior_scale` for biases.
        - `inference`: whether calls use the posterior mean.

        **Raises:** `TypeError` if `mean` is no `Conv` or not of a real floating dtype, `ValueError`
        for a scale that is not positive.
        """
        check_instance(mean, "BayesianConv")
        if not isinstance(mean, Conv):
            raise TypeError(f"mean must be an nn.Conv, got a {type(mean).__name__}.")
        dtype = mean.weight.dtype
        check_real_floating(dtype, "BayesianConv")
        check_scale(prior_scale, "prior_scale")
        check_scale(posterior_scale, "posterior_scale")
        self.mean = mean
        limit = _weight_limit(mean)
        self.weight_rho = rho_for(posterior_scale * limit, mean.weight.shape, dtype)
        bias = mean.bias
        self.bias_rho = None if bias is None else rho_for(posterior_scale, bias.shape, dtype)
        # Those of layers that are stored stacked have axes before their own.
        stacked = mean.weight.shape[: -(mean.num_spatial_dims + 2)]
        self.prior_scale = scale_of_each(prior_scale, stacked)
        self.inference = inference

    @property
    def weight_prior_scale(self) -> Float[Array, ""]:
        """Prior standard deviation of each weight, in the dtype of the weights."""
        return self.bias_prior_scale * _weight_limit(self.mean)

    @property
    def bias_prior_scale(self) -> Float[Array, ""]:
        """Prior standard deviation of each bias, in the dtype of the weights."""
        return jnp.asarray(self.prior_scale, self.mean.weight.dtype)

    def __call__(
        self, x: Float[Array, "in_channels *sizes"], *, key: PRNGKeyArray | None = None
    ) -> Float[Array, "out_channels *new_sizes"]:
        """**Arguments:**

        - `x`: shape `(in_channels, dim_1, ..., dim_N)`, as for `Conv`.
        - `key`: for the noise; needed unless in inference mode. Give each example of a batch its
          own.

        **Returns:** shape `(out_channels, new_dim_1, ..., new_dim_N)`.

        **Raises:** `ValueError` if `x` has another shape, `RuntimeError` if a key is needed and
        none came.
        """
        y = self.mean(x)
        if self.inference:
            return y
        key = check_key(key, self)
        variance = self._with_weights(
            jax.nn.softplus(self.weight_rho) ** 2,
            None if self.bias_rho is None else jax.nn.softplus(self.bias_rho) ** 2,
        )
        return y + draw_noise(key, variance(x**2))

    def kl(self) -> Float[Array, ""]:
        """KL(posterior || prior), summed over weights and biases, in closed form.

        **Returns:** shape `()`, at least float32.
        """
        kl = gaussian_kl(self.mean.weight, self.weight_rho, self.weight_prior_scale)
        if self.mean.bias is not None and self.bias_rho is not None:
            kl = kl + gaussian_kl(self.mean.bias, self.bias_rho, self.bias_prior_scale)
        return kl

    def sample(self, key: PRNGKeyArray) -> Conv:
        """**Returns:** a convolution like `mean`, weights and biases drawn from the posterior."""
        weight_key, bias_key = jr.split(key)
        weight = draw_gaussian(weight_key, self.mean.weight, self.weight_rho)
        if self.mean.bias is None or self.bias_rho is None:
            return self._with_weights(weight, None)
        return self._with_weights(weight, draw_gaussian(bias_key, self.mean.bias, self.bias_rho))

    def _with_weights(self, weight: Array, bias: Array | None) -> Conv:
        if bias is None:
            return tree_at(lambda conv: conv.weight, self.mean, weight)
        return tree_at(lambda conv: (conv.weight, conv.bias), self.mean, (weight, bias))


def _weight_limit(conv: Conv) -> float:
    return fan_in_limit(conv.in_channels // conv.groups * math.prod(conv.kernel_size))
