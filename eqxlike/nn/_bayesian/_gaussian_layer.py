"""Base classes of Bayesian layers: estimators, KL divergence, draws, means and scales."""

import abc
import math
from collections.abc import Callable
from typing import Any, Literal, Self, TypeVar, get_args

import jax
import jax.numpy as jnp
import jax.random as jr
import jax.tree_util as jtu
from jaxtyping import Array, Float, PRNGKeyArray, PyTree

from ... import AbstractVar, Module, field, is_array, tree_at
from ..._check_numbers import check_scale
from ..._dtypes import at_least_float32, is_key, wider
from .._inputs import check_instance, describe

# --- Bayesian layers, and functions of whole models ---


Tree = TypeVar("Tree", bound=Any)


class BayesianLayer(Module):
    """Base of layers whose weights are random, with a posterior and a prior.

    `kl_divergence` and `sample_posterior` find the instances of subclasses in any model. A layer is
    Bayesian only if its class is a subclass of `BayesianLayer`. A method `sample` is not enough.

    Optional methods: `mean_layer()` returns the ordinary layer, such as a `Linear`, that
    `posterior_mean` inserts. `posterior_scales()` and `prior_scales()` return layers of the same
    structure whose arrays are standard deviations. Inference algorithms that store means and scales
    separately need these two methods. The function `with_perturbation` calls the method
    `with_perturbation(key)` of each layer.

    >>> import eqxlike as eqx, jax, jax.numpy as jnp
    >>> class Shift(BayesianLayer):
    ...     mean: jax.Array
    ...     def __call__(self, x, *, key):
    ...         return x + self.mean + jax.random.normal(key)
    ...     def kl(self):
    ...         return self.mean**2 / 2
    ...     def sample(self, key):
    ...         shift = self.mean + jax.random.normal(key)
    ...         return lambda x: x + shift
    >>> float(kl_divergence([Shift(jnp.array(2.0)), Shift(jnp.array(4.0))]))
    10.0
    """

    @abc.abstractmethod
    def kl(self) -> Float[Array, ""]:
        """The KL divergence KL(posterior || prior), shape `()`."""

    @abc.abstractmethod
    def sample(self, key: PRNGKeyArray) -> Any:
        """A layer with weights drawn from the posterior, the same for all inputs."""

    def with_perturbation(self, key: PRNGKeyArray) -> Self:
        """Returns the layer with noise that all examples share. By default, returns the layer
        itself.
        """
        del key
        return self


def is_bayesian(node: Any) -> bool:
    return isinstance(node, BayesianLayer)


def kl_divergence(model: PyTree) -> Float[Array, ""]:
    """KL(posterior || prior), summed over every `BayesianLayer` in a pytree.

    **Returns:** shape `()`; zero if there is no such layer.

    **Raises:** `TypeError` if `model` is a class.

    >>> import jax
    >>> from eqxlike import nn
    >>> float(kl_divergence({"plain": nn.Linear(2, 2, key=jax.random.key(0))}))
    0.0
    """
    check_instance(model, "kl_divergence")
    nodes = jtu.tree_leaves(model, is_leaf=is_bayesian)
    terms = [node.kl() for node in nodes if is_bayesian(node)]
    return sum_in_widest([jnp.zeros((), jnp.float32), *terms])


def sum_in_widest(terms: list[Array]) -> Float[Array, ""]:
    """Adds numbers in order, in the widest of their dtypes. Supports strict promotion mode too."""
    total = terms[0]
    for term in terms[1:]:
        dtype = wider(total.dtype, term.dtype)
        total = total.astype(dtype) + term.astype(dtype)
    return total


def sample_posterior(model: PyTree, key: PRNGKeyArray) -> PyTree:
    """Draws a network: replaces every `BayesianLayer` by an ordinary layer with weights from its
    posterior.

    **Arguments:**

    - `model`: any pytree. Everything except `BayesianLayer`s is unchanged.
    - `key`: random key, split into one key for each `BayesianLayer`.

    **Returns:** a deterministic model.

    **Raises:** `TypeError` if `model` is a class.

    >>> import jax
    >>> from eqxlike import nn
    >>> model = nn.Sequential([nn.BayesianLinear(3, 4, key=jax.random.key(0))])
    >>> type(sample_posterior(model, jax.random.key(1)).layers[0]).__name__
    'Linear'
    """
    check_instance(model, "sample_posterior")
    return _map_with_keys(lambda layer, key: layer.sample(key), model, key)


def with_perturbation(model: Tree, key: PRNGKeyArray) -> Tree:
    """Gives Bayesian layers the noise that the examples of a batch share. Call it once per step.

    Layers with `estimator="flipout"` share the perturbation of the weights. Layers with
    `estimator="weights"` share the weights. Call this function in the loss, before `jax.vmap` over
    the examples. Each layer stores a key instead of the noise, so that an optimiser cannot mistake
    the noise for a parameter. The layer draws the noise inside `jax.vmap`, but only once, because
    the key has no batch axis.

    **Arguments:**

    - `model`: any pytree. Everything except `BayesianLayer`s is unchanged. Layers with
      `estimator="local"`, the default, are unchanged too, because their examples share no noise.
    - `key`: random key; use a new key for each step. It is split into one key for each
      `BayesianLayer`.

    **Returns:** a copy of the model whose layers use the same noise for all examples.
    `kl_divergence`, `sample_posterior` and `inference_mode` give the same results as for the
    original model.

    **Raises:** `TypeError` if `model` is a class.

    >>> import eqxlike as eqx, jax, jax.numpy as jnp
    >>> from eqxlike import nn
    >>> model = nn.BayesianLinear(3, 4, estimator="flipout", key=jax.random.key(0))
    >>> def loss(model, x, y, key):
    ...     shared_key, own_key = jax.random.split(key)
    ...     model = nn.with_perturbation(model, shared_key)
    ...     keys = jax.random.split(own_key, len(x))
    ...     outputs = jax.vmap(lambda x, key: model(x, key=key))(x, keys)
    ...     return jnp.sum((outputs - y) ** 2) + nn.kl_divergence(model)
    >>> eqx.filter_jit(loss)(model, jnp.ones((5, 3)), jnp.ones((5, 4)), jax.random.key(1)).shape
    ()
    """
    check_instance(model, "with_perturbation")
    return _map_with_keys(lambda layer, key: layer.with_perturbation(key), model, key)


def _map_with_keys(
    function: Callable[[BayesianLayer, PRNGKeyArray], Any], model: Any, key: PRNGKeyArray
) -> Any:
    nodes, treedef = jtu.tree_flatten(model, is_leaf=is_bayesian)
    keys = iter(jr.split(key, max(1, sum(map(is_bayesian, nodes)))))
    return treedef.unflatten(
        [function(node, next(keys)) if is_bayesian(node) else node for node in nodes]
    )


Estimator = Literal["local", "flipout", "weights"]


class SharedKey(Module):
    """A random key that several calls use on purpose, so that all calls draw the same numbers.

    The key is stored as key data, so that JAX's check for key reuse does not raise an error.
    """

    data: Array
    implementation: Any = field(static=True)

    def __init__(self, key: PRNGKeyArray):
        self.data = jr.key_data(key)
        self.implementation = jr.key_impl(key) if is_key(key) else None

    def key(self) -> PRNGKeyArray:
        """**Returns:** the key, in its original form (typed key or raw key data)."""
        if self.implementation is None:
            return self.data
        return jr.wrap_key_data(self.data, impl=self.implementation)


class GaussianLayer(BayesianLayer):
    """Base of layers with independent Gaussian weights, whose output is linear in the weights.

    For a single input, each entry of the output has the same distribution with every estimator. The
    estimators differ in cost, and in the correlations between outputs:

    - `"local"` draws each entry of the output independently (Kingma, Salimans & Welling 2015).
    - `"flipout"` draws one perturbation of the weights for all examples of a batch, and random
      signs for each example. With the posterior mean `m`, the perturbation `D` and signs `r` and
      `s`, the output is `m @ x + r * (D @ (s * x))` (Wen, Vicol, Ba, Tran & Grosse 2018).
    - `"weights"` draws all weights (Blundell, Cornebise, Kavukcuoglu & Wierstra 2015).

    `with_perturbation` sets `shared_key`, the key of the noise that examples share. The key has no
    batch axis, so that under `jax.vmap` the noise is drawn once.
    """

    weight_rho: AbstractVar[Array]
    bias_rho: AbstractVar[Array | None]
    inference: AbstractVar[bool]
    estimator: AbstractVar[Estimator]
    shared_key: AbstractVar[SharedKey | None]
    weight_prior_scale: AbstractVar[Array]
    prior_scale: AbstractVar[float | Array]
    _stacked: AbstractVar[tuple[int, ...]]
    """The leading axes of stacked layers; empty for a single layer."""

    @property
    def bias_prior_scale(self) -> Float[Array, "*stacked"]:
        """Prior standard deviation of each bias, in the dtype of the weights."""
        return jnp.asarray(self.prior_scale, self.weight_rho.dtype)

    @abc.abstractmethod
    def mean_layer(self) -> Any:
        """**Returns:** an ordinary layer whose arrays are the posterior means."""

    def kl(self) -> Float[Array, ""]:
        """KL(posterior || prior), summed over weights and biases, in closed form.

        For a posterior N(m, s^2) and a prior N(0, p^2), the divergence is `log(p / s) + (s^2 + m^2)
        / (2 p^2) - 1/2`.

        **Returns:** shape `()`, in at least float32, because a sum over many weights would lose
        precision in a narrower dtype.
        """
        mean = self.mean_layer()
        kl = _gaussian_kl(mean.weight, self.weight_rho, self.weight_prior_scale)
        if self.bias_rho is None:
            return kl
        return kl + _gaussian_kl(mean.bias, self.bias_rho, self.bias_prior_scale)

    def sample(self, key: PRNGKeyArray) -> Any:
        """**Returns:** an ordinary layer with weights and biases drawn from the posterior."""
        weight_key, bias_key = jr.split(key)
        mean = self.mean_layer()
        weight = draw_gaussian(weight_key, mean.weight, self.weight_rho)
        if self.bias_rho is None:
            return with_arrays(mean, weight, None)
        return with_arrays(mean, weight, draw_gaussian(bias_key, mean.bias, self.bias_rho))

    def posterior_scales(self) -> Any:
        """**Returns:** an ordinary layer whose arrays are the posterior standard deviations."""
        return self._map_rho(jax.nn.softplus)

    def prior_scales(self) -> Any:
        """**Returns:** an ordinary layer whose arrays are the prior standard deviations."""
        mean = self.mean_layer()
        weight = _broadcast(self.weight_prior_scale, mean.weight)
        bias = None if mean.bias is None else _broadcast(self.bias_prior_scale, mean.bias)
        return with_arrays(mean, weight, bias)

    def with_perturbation(self, key: PRNGKeyArray) -> Self:
        """**Returns:** the layer with a key for shared noise; unchanged for `"local"`."""
        if self.estimator == "local":
            return self
        # Each of several stacked layers has its own key.
        shared_key = SharedKey(jr.split(key, self._stacked) if self._stacked else key)
        return tree_at(
            lambda layer: layer.shared_key, self, shared_key, is_leaf=lambda node: node is None
        )

    def _output(self, x: Array, key: PRNGKeyArray | None) -> Array:
        if self.inference:
            return self.mean_layer()(x)
        if key is None:
            raise RuntimeError(
                f"{describe(self)} needs a key outside inference mode: write `layer(x, key=key)`, "
                "use the posterior mean by `nn.inference_mode(model)`, or draw a network by "
                "`nn.sample_posterior(model, key)`."
            )
        if self.estimator == "weights":
            return self.sample(key if self.shared_key is None else self.shared_key.key())(x)
        noise = self._local_noise if self.estimator == "local" else self._flipout_noise
        return self.mean_layer()(x) + noise(x, key)

    def _local_noise(self, x: Array, key: PRNGKeyArray) -> Array:
        variance = self._map_rho(lambda rho: jax.nn.softplus(rho) ** 2)
        return _draw_noise(key, variance(x**2))

    def _flipout_noise(self, x: Array, key: PRNGKeyArray) -> Array:
        if self.shared_key is None:
            raise RuntimeError(
                f'{describe(self)} with estimator="flipout" needs a perturbation that the '
                "examples of a batch share: in the loss, before `jax.vmap`, call `model = "
                "nn.with_perturbation(model, key)`, with a new key in each step."
            )
        keys = iter(jr.split(self.shared_key.key()))
        perturbation = self._map_rho(
            lambda rho: draw_gaussian(next(keys), jnp.zeros_like(rho), rho)
        )
        in_key, out_key = jr.split(key)
        # A bias is the weight of a constant input 1, which has no random sign. The bias is
        # multiplied only by the sign of the output.
        y = perturbation(_random_signs(in_key, x) * x)
        return _random_signs(out_key, y) * y

    def _map_rho(self, function: Callable[[Array], Array]) -> Any:
        bias = None if self.bias_rho is None else function(self.bias_rho)
        return with_arrays(self.mean_layer(), function(self.weight_rho), bias)


def with_arrays(layer: Any, weight: Any, bias: Any) -> Any:
    """Returns an ordinary layer with the new weight, and with the new bias unless it is `None`."""
    if bias is None:
        return tree_at(lambda layer: layer.weight, layer, weight)
    return tree_at(lambda layer: (layer.weight, layer.bias), layer, (weight, bias))


def with_posterior_scales(layer: Any, scales: Any) -> Any:
    """A `GaussianLayer` whose posterior standard deviations are the arrays of `scales`."""
    bias = None if layer.bias_rho is None else rho_of(scales.bias)
    return with_rhos(layer, with_arrays(scales, rho_of(scales.weight), bias))


def with_rhos(layer: Any, rhos: Any) -> Any:
    """A `GaussianLayer` whose `rho` arrays are the arrays of the layer `rhos`."""
    if layer.bias_rho is None:
        return tree_at(lambda layer: layer.weight_rho, layer, rhos.weight)
    return tree_at(
        lambda layer: (layer.weight_rho, layer.bias_rho), layer, (rhos.weight, rhos.bias)
    )


def check_parts(mean: Any, scales: Any, plain: type) -> None:
    """Raises unless `mean` and `scales` are layers of type `plain` with the same shapes."""
    for name, layer in (("mean", mean), ("scales", scales)):
        check_instance(layer, f"from_parts: {name}")
        if not isinstance(layer, plain):
            raise TypeError(f"{name} must be an nn.{plain.__name__}, got a {type(layer).__name__}.")
    for name in ("weight", "bias"):
        shapes = [getattr(getattr(layer, name), "shape", None) for layer in (mean, scales)]
        if shapes[0] != shapes[1]:
            expected, got = ("None" if shape is None else f"shape {shape}" for shape in shapes)
            raise ValueError(
                f"from_parts expects scales.{name} to be like mean.{name}, {expected}; got {got}."
            )


def _broadcast(scale: Array, array: Array) -> Array:
    scale = jnp.expand_dims(scale, range(scale.ndim, array.ndim))
    return jnp.broadcast_to(scale, array.shape)


def _random_signs(key: PRNGKeyArray, x: Array) -> Array:
    """Draws a factor for `x`: one random sign for each feature or channel."""
    shape = x.shape[:1]
    # Each random 32-bit word gives 32 signs. `jax.random.rademacher` uses a word for each sign.
    # With `rademacher`, an ELBO step of an MLP with 784 inputs takes 1.8 ms instead of 1.1 ms.
    words = jr.bits(key, (math.prod(shape) // 32 + 1, 1), jnp.uint32)
    bits = jnp.ravel(words >> jnp.arange(32, dtype=jnp.uint32)[None] & 1)
    signs = 1 - 2 * bits[: math.prod(shape)].reshape(shape).astype(x.dtype)
    return jnp.expand_dims(signs, range(len(shape), x.ndim))


# --- Independent Gaussians N(mean, softplus(rho)^2) ---


def rho_for(scale: float, shape: tuple[int, ...], dtype: jnp.dtype) -> Float[Array, "*shape"]:
    """An array filled with the `rho` for which `softplus(rho)` equals `scale`."""
    return jnp.full(shape, scale + math.log(-math.expm1(-scale)), dtype)


def rho_of(scale: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """The `rho` of each standard deviation: the inverse of `softplus`, accurate for any scale."""
    exact = scale.astype(at_least_float32(scale.dtype))
    return (exact + jnp.log(-jnp.expm1(-exact))).astype(scale.dtype)


def scale_of_each(scale: Any, stacked: tuple[int, ...]) -> Any:
    """Broadcasts an array `scale` to the leading axes of stacked layers. Returns a number
    unchanged.
    """
    return jnp.broadcast_to(scale, stacked) if is_array(scale) and stacked else scale


def draw_gaussian(
    key: PRNGKeyArray, mean: Float[Array, "*shape"], rho: Float[Array, "*shape"]
) -> Float[Array, "*shape"]:
    """One draw of N(mean, softplus(rho)^2)."""
    return mean + jax.nn.softplus(rho) * jr.normal(key, mean.shape, mean.dtype)


def _draw_noise(key: PRNGKeyArray, variance: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """One draw of N(0, variance), with a finite gradient where the variance is 0."""
    # Without a bias the variance is 0 at x = 0, where the gradient of the square root is infinite.
    is_positive = variance > 0
    scale = jnp.where(is_positive, jnp.sqrt(jnp.where(is_positive, variance, 1)), 0)
    return scale * jr.normal(key, scale.shape, scale.dtype)


def _gaussian_kl(
    mean: Float[Array, "*shape"], rho: Float[Array, "*shape"], prior_scale: Float[Array, "*stacked"]
) -> Float[Array, ""]:
    """KL(N(mean, softplus(rho)^2) || N(0, prior_scale^2)), summed, in at least float32.

    `prior_scale` has shape `()`, or the leading axes of stacked layers.
    """
    dtype = at_least_float32(mean.dtype)
    mean, rho, prior = mean.astype(dtype), rho.astype(dtype), prior_scale.astype(dtype)
    prior = jnp.expand_dims(prior, range(prior.ndim, mean.ndim))
    scale = jax.nn.softplus(rho)
    # For `rho` below -40, log(softplus(rho)) = rho - exp(rho) / 2 + ... equals rho in float64. If
    # the scale underflows to 0, its logarithm is infinite, but rho is finite. The inner `where`
    # avoids 0 / 0 in the gradient.
    is_tiny = rho < -40
    log_scale = jnp.where(is_tiny, rho, jnp.log(jnp.where(is_tiny, 1, scale)))
    ratio = (scale / prior) ** 2 + (mean / prior) ** 2
    return jnp.sum(jnp.log(prior) - log_scale + (ratio - 1) / 2)


def check_gaussian(
    layer_name: str, dtype: jnp.dtype, prior_scale: Any, posterior_scale: Any, estimator: Any
) -> None:
    """Raises an error if the dtype is not real floating, or a scale or the estimator is invalid."""
    if not jnp.issubdtype(dtype, jnp.floating):
        raise TypeError(f"{layer_name} needs a real floating dtype, got {dtype}.")
    check_scale(prior_scale, "prior_scale")
    check_scale(posterior_scale, "posterior_scale")
    check_estimator(estimator)


def check_estimator(estimator: Any) -> None:
    """Raises `ValueError` for an unknown estimator."""
    if estimator not in get_args(Estimator):
        names = ", ".join(map(repr, get_args(Estimator)))
        raise ValueError(f"estimator must be one of {names}, got {estimator!r}.")
