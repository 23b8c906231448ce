"""Convolutions whose weights are random: a Gaussian posterior beside a Gaussian prior."""

import math

import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

from ..._module import field
from ..._numbers import check_scale
from .._common import (
    axis_names,
    check_input,
    check_instance,
    check_real_floating,
    fan_in_limit,
    rho_for,
    scale_of_each,
)
from .._conv import Conv
from ._gaussian_layer import (
    Estimator,
    GaussianLayer,
    SharedKey,
    check_estimator,
    check_parts,
    with_posterior_scales,
)


class BayesianConv(GaussianLayer):
    """A convolution with independent Gaussian weights: a mean-field variational layer.

    Posterior: each weight is N(m, s^2) with `s = softplus(rho)`. Prior: weights N(0, prior_scale^2
    / fan_in), biases N(0, prior_scale^2), with `fan_in = in_channels / groups * (points of the
    kernel)`: the scales mean what they do for `BayesianLinear`.

    What is drawn in training is chosen by `estimator`, as for `BayesianLinear`:

    - `"local"`: the output. For given `x` each entry is Gaussian, with the convolution of `x` by
      `m` as its mean and that of `x^2` by `s^2` as its variance (Kingma, Salimans & Welling 2015,
      "Variational Dropout and the Local Reparameterization Trick"; for convolutions Shridhar,
      Laumann & Liwicki 2019, "A Comprehensive guide to Bayesian Convolutional Neural Network with
      Variational Inference"). Each entry has the distribution that random weights give it, and is
      drawn by itself; under weights that are shared by all places, entries of one output would be
      correlated.
    - `"flipout"`: one perturbation of the weights for the batch, and for each example random signs
      of the channels of input and output, shared by all places (Wen, Vicol, Ba, Tran & Grosse
      2018). The perturbation comes from `with_perturbation`, once a step.
    - `"weights"`: the weights (Blundell, Cornebise, Kavukcuoglu & Wierstra 2015).

    `sample` draws weights that are the same for all inputs, as predictions need.

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

        - `mean`: the convolution by the posterior means, of any number of spatial axes.
        - `prior_scale`: sets the prior's standard deviations, see above. A float is a constant; an
          array of shape `()` is a leaf like the others, and an optimiser that sees it learns it.
        - `posterior_scale`: sets the initial standard deviations the same way: `posterior_scale /
          sqrt(fan_in)` for weights, `posterior_scale` for biases.
        - `inference`: whether calls use the posterior mean.
        - `estimator`: `"local"`, `"flipout"` or `"weights"`, see above.

        **Raises:** `TypeError` if `mean` is no `Conv` or not of a real floating dtype, `ValueError`
        for a scale that is not positive or an unknown estimator.
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
        self.prior_scale = scale_of_each(prior_scale, self._stacked)
        self.inference = inference
        self.shared_key = None
        self.estimator = check_estimator(estimator)

    @classmethod
    def from_parts(
        cls, mean: Conv, scales: Conv, *, estimator: Estimator = "local"
    ) -> "BayesianConv":
        """The layer of which `mean_layer` and `posterior_scales` are these; the inverse of both.

        Arguments and errors are those of `BayesianLinear.from_parts`, with a `Conv` each.

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
        check_input(self, x, (self.mean.in_channels, *axis_names(self.mean.num_spatial_dims)))
        return self._output(x, key)

    def mean_layer(self) -> Conv:
        """**Returns:** the convolution by the posterior means."""
        return self.mean


def _weight_limit(conv: Conv) -> float:
    return fan_in_limit(conv.in_channels // conv.groups * math.prod(conv.kernel_size))
