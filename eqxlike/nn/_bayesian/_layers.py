"""Bayesian linear layers, convolutions and MLPs, and their conversion to means and scales."""

import functools
import itertools
import math
from collections.abc import Callable
from typing import Any, Literal, Self

import jax
import jax.numpy as jnp
import jax.random as jr
import jax.tree_util as jtu
from jaxtyping import Array, Float, PRNGKeyArray, PyTree

from ... import Module, field, filter_eval_shape, is_array, tree_at
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
    check_estimator,
    check_gaussian,
    check_parts,
    is_bayesian,
    rho_for,
    scale_of_each,
    with_arrays,
    with_posterior_scales,
    with_rhos,
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
    ) -> Self:
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
    def from_parts(cls, mean: Linear, scales: Linear, *, estimator: Estimator = "local") -> Self:
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
    def from_parts(cls, mean: Conv, scales: Conv, *, estimator: Estimator = "local") -> Self:
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


# --- Conversion between Bayesian models and their means and scales ---


def posterior_mean(model: PyTree) -> PyTree:
    """Replaces every `BayesianLayer` in a pytree by an ordinary layer with the posterior means.

    The new model returns the same outputs as `model` in inference mode, and needs no key.

    **Arguments:**

    - `model`: any pytree. Everything except `BayesianLayer`s is unchanged.

    **Returns:** the model with a `Linear` for each `BayesianLinear` and a `Conv` for each
    `BayesianConv`. Frozen arrays stay frozen.

    **Raises:** `TypeError` if `model` is a class, or has a custom `BayesianLayer` without a method
    `mean_layer`.

    >>> import jax
    >>> from eqxlike import nn
    >>> model = nn.BayesianMLP(2, 1, width_size=8, depth=1, key=jax.random.key(0))
    >>> type(posterior_mean(model).layers[0]).__name__
    'Linear'
    """
    check_instance(model, "posterior_mean")
    return _map_layers(model, "mean_layer", lambda leaf: leaf)


def posterior_scales(model: PyTree) -> PyTree:
    """The posterior standard deviations of a model.

    **Returns:** a tree like `posterior_mean(model)`, with standard deviations for the arrays of
    `BayesianLayer`s, and `None` for all other leaves.

    **Raises:** `TypeError` if `model` is a class, or has a `BayesianLayer` without a method
    `posterior_scales`.

    >>> import jax
    >>> from eqxlike import nn
    >>> layer = nn.Linear(2, 1, key=jax.random.key(0))
    >>> scales = posterior_scales([layer, nn.BayesianLinear.around(layer, posterior_scale=0.1)])
    >>> scales[0].weight, round(float(scales[1].bias[0]), 6)
    (None, 0.1)
    """
    check_instance(model, "posterior_scales")
    return _map_layers(model, "posterior_scales", lambda leaf: None)


def prior_scales(model: PyTree) -> PyTree:
    """The prior standard deviations of a model, in a tree like the result of `posterior_scales`.

    >>> import jax
    >>> from eqxlike import nn
    >>> layer = nn.BayesianLinear(4, 1, prior_scale=2.0, key=jax.random.key(0))
    >>> prior_scales(layer).weight.tolist()
    [[1.0, 1.0, 1.0, 1.0]]
    """
    check_instance(model, "prior_scales")
    return _map_layers(model, "prior_scales", lambda leaf: None)


def _map_layers(model: PyTree, method: str, other: Callable[[Any], Any]) -> PyTree:
    """Replaces `BayesianLayer`s by the results of `method`, and other leaves by `other(leaf)`."""

    def change(path: jtu.KeyPath, node: Any) -> Any:
        if not is_bayesian(node):
            return other(node)
        if not hasattr(node, method):
            raise TypeError(
                f"{type(node).__name__} at model{jtu.keystr(path)} has no method `{method}`, which "
                "is needed to split it into means and scales. Define it as `nn.BayesianLayer` "
                "describes."
            )
        return getattr(node, method)()

    return jtu.tree_map_with_path(change, model, is_leaf=is_bayesian)


def bayesian_from_parts(
    network: PyTree, scales: PyTree, estimator: Estimator, *, are_rhos: bool = False
) -> PyTree:
    """Converts `Linear` and `Conv` layers to Bayesian layers with given means and scales.

    This is the inverse of `posterior_mean` and `posterior_scales`.

    **Arguments:**

    - `network`: a Module or any pytree. Its arrays are the posterior means.
    - `scales`: a tree like `network`, with posterior standard deviations for arrays. Leaves may be
      `None` or missing.
    - `estimator`: estimator of all layers.
    - `are_rhos`: whether `scales` contains `rho` instead of the standard deviation `softplus(rho)`.

    **Returns:** the network with Bayesian layers. Each `Linear` or `Conv` with scales for all its
    arrays becomes a `BayesianLinear` or a `BayesianConv`. Other arrays with scales are unchanged,
    so the caller must draw samples of these arrays. `layers_with_estimators` returns `False` for
    these arrays.

    **Raises:**

    - `TypeError` if `network` is a class.
    - `ValueError` if the estimator is unknown.
    - `ValueError` if a scale and its array differ in shape.
    - `ValueError` if `network` has no array for a scale.

    >>> import jax, jax.numpy as jnp
    >>> from eqxlike import nn
    >>> network = [nn.Linear(2, 1, key=jax.random.key(0)), nn.LayerNorm(1)]
    >>> scales = jax.tree.map(jnp.ones_like, network)
    >>> [type(layer).__name__ for layer in bayesian_from_parts(network, scales, "local")]
    ['BayesianLinear', 'LayerNorm']
    """
    check_instance(network, "bayesian_from_parts")
    check_estimator(estimator)
    nodes, treedef, parts = _match_scales(network, scales)

    set_scales = with_rhos if are_rhos else with_posterior_scales

    def bayesian(node: Any, scale: Any) -> Any:
        if scale is None:
            return node
        make: Any = BayesianLinear.around if isinstance(node, Linear) else BayesianConv
        return set_scales(make(node, estimator=estimator), scale)

    return treedef.unflatten(map(bayesian, nodes, parts))


def layers_with_estimators(network: PyTree, scales: PyTree) -> PyTree[bool]:
    """Returns which arrays `bayesian_from_parts` converts to parameters of Bayesian layers.

    **Returns:** a tree like `network` with booleans. The arrays of a `Linear` or `Conv` become
    `True` if the layer has scales for all its arrays. All other leaves become `False`.

    >>> import jax, jax.numpy as jnp
    >>> from eqxlike import nn
    >>> network = [nn.Linear(2, 1, key=jax.random.key(0)), nn.LayerNorm(1)]
    >>> covered = layers_with_estimators(network, jax.tree.map(jnp.ones_like, network))
    >>> covered[0].weight, covered[1].weight
    (True, False)
    """
    check_instance(network, "layers_with_estimators")
    nodes, treedef, parts = _match_scales(network, scales)
    return treedef.unflatten(
        jtu.tree_map(lambda leaf, is_covered=scale is not None: is_covered, node)
        for node, scale in zip(nodes, parts, strict=True)
    )


def linear_or_conv(node: Any) -> bool:
    """Whether a node is a layer that can become Bayesian. Errors show this function's name."""
    # A subclass that overrides `__call__` may compute something else.
    return type(node).__call__ in (Linear.__call__, Conv.__call__)


def _match_scales(network: PyTree, scales: PyTree) -> tuple[list[Any], Any, list[Any]]:
    """Returns the layers and leaves of `network`, the treedef of `network`, and the scales.

    The list of scales has one entry for each layer or leaf: its scales, or `None` if it cannot
    become Bayesian.
    """
    # An array has the same path string whether it is frozen or not. Matching by path strings
    # therefore works if `network` has frozen arrays and `scales` has none.
    by_path = {jtu.keystr(path): leaf for path, leaf in jtu.tree_leaves_with_path(scales)}
    _check_scales(network, by_path)
    nodes, treedef = jtu.tree_flatten_with_path(network, is_leaf=linear_or_conv)
    return [node for _, node in nodes], treedef, [_scales_of(*each, by_path) for each in nodes]


def _check_scales(network: PyTree, by_path: dict[str, Any]) -> None:
    arrays = {jtu.keystr(path): leaf for path, leaf in jtu.tree_leaves_with_path(network)}
    for path, scale in by_path.items():
        if not is_array(arrays.get(path)):
            raise ValueError(
                f"There is a scale at scales{path}, but no array at network{path}: scales must be "
                "a tree like the network, with `None` for leaves without a scale."
            )
        if jnp.shape(scale) != arrays[path].shape:
            raise ValueError(
                f"Expected scales{path} to have the shape of network{path}, "
                f"{arrays[path].shape}; got {jnp.shape(scale)}."
            )


def _scales_of(path: jtu.KeyPath, node: Any, by_path: dict[str, Any]) -> Any:
    """A copy of the layer `node` with scales as its arrays; `None` if `node` cannot become
    Bayesian.
    """
    if not linear_or_conv(node) or not jnp.issubdtype(node.weight.dtype, jnp.floating):
        return None
    inner, treedef = jtu.tree_flatten_with_path(node)
    found = [by_path.get(jtu.keystr((*path, *each))) for each, _ in inner]
    return None if any(scale is None for scale in found) else treedef.unflatten(found)
