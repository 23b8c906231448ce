"""What layers with independent Gaussian weights have in common: estimators, KL, draws, parts."""

import abc
import math
from collections.abc import Callable
from typing import Any, Literal, Self, get_args

import jax
import jax.numpy as jnp
import jax.random as jr
from jaxtyping import Array, Float, PRNGKeyArray

from ..._dtypes import is_key
from ..._module import AbstractVar, Module, field
from ..._pytree import tree_at
from .._common import (
    check_instance,
    check_key,
    describe,
    draw_gaussian,
    draw_noise,
    gaussian_kl,
    rho_of,
)
from ._posterior import BayesianLayer

Estimator = Literal["local", "flipout", "weights"]


class SharedKey(Module):
    """A key that several calls draw by, to draw alike.

    It is kept as the numbers that it is made of: JAX's check for keys that are used twice would
    take what is meant here for a mistake.
    """

    data: Array
    implementation: Any = field(static=True)

    def __init__(self, key: PRNGKeyArray):
        self.data = jr.key_data(key)
        self.implementation = jr.key_impl(key) if is_key(key) else None

    def key(self) -> PRNGKeyArray:
        """**Returns:** the key, of the kind that it was."""
        if self.implementation is None:
            return self.data
        return jr.wrap_key_data(self.data, impl=self.implementation)


class GaussianLayer(BayesianLayer):
    """One plain layer for given weights, which are independent Gaussians.

    Whatever the estimator, an entry of the output has the same distribution for one input. What
    the outputs for several inputs have in common differs, and what they cost:

    - `"local"` draws the output, entry by entry, each by itself (Kingma, Salimans & Welling 2015).
    - `"flipout"` draws one perturbation of the weights for all examples of a batch, and for each
      example random signs: with a perturbation `D` and the signs `r` and `s` of the example, the
      output is `m @ x + r * (D @ (s * x))` (Wen, Vicol, Ba, Tran & Grosse 2018).
    - `"weights"` draws all weights (Blundell, Cornebise, Kavukcuoglu & Wierstra 2015).

    What examples share has a key of its own, `shared_key`, which `with_perturbation` puts in: it
    has no batch axis, so that what is drawn by it under `jax.vmap` is drawn once.
    """

    weight_rho: AbstractVar[Array]
    bias_rho: AbstractVar[Array | None]
    inference: AbstractVar[bool]
    estimator: AbstractVar[Estimator]
    shared_key: AbstractVar[SharedKey | None]
    weight_prior_scale: AbstractVar[Array]
    bias_prior_scale: AbstractVar[Array]
    _stacked: AbstractVar[tuple[int, ...]]
    """The axes before those of one layer, where layers are stored stacked."""

    @abc.abstractmethod
    def mean_layer(self) -> Any:
        """**Returns:** the plain layer whose arrays are the posterior means."""

    def kl(self) -> Float[Array, ""]:
        """KL(posterior || prior), summed over weights and biases, in closed form.

        A Gaussian N(m, s^2) against N(0, p^2) gives `log(p / s) + (s^2 + m^2) / (2 p^2) - 1/2`.

        **Returns:** shape `()`, at least float32: a sum over many weights loses digits in less.
        """
        mean = self.mean_layer()
        kl = gaussian_kl(mean.weight, self.weight_rho, self.weight_prior_scale)
        if self.bias_rho is None:
            return kl
        return kl + gaussian_kl(mean.bias, self.bias_rho, self.bias_prior_scale)

    def sample(self, key: PRNGKeyArray) -> Any:
        """**Returns:** a plain layer with weights and biases drawn from the posterior."""
        weight_key, bias_key = jr.split(key)
        mean = self.mean_layer()
        weight = draw_gaussian(weight_key, mean.weight, self.weight_rho)
        if self.bias_rho is None:
            return with_arrays(mean, weight, None)
        return with_arrays(mean, weight, draw_gaussian(bias_key, mean.bias, self.bias_rho))

    def posterior_scales(self) -> Any:
        """**Returns:** a plain layer whose arrays are the posterior standard deviations."""
        return self._map_rho(jax.nn.softplus)

    def prior_scales(self) -> Any:
        """**Returns:** a plain layer whose arrays are the prior standard deviations."""
        mean = self.mean_layer()
        weight = _broadcast(self.weight_prior_scale, mean.weight)
        bias = None if mean.bias is None else _broadcast(self.bias_prior_scale, mean.bias)
        return with_arrays(mean, weight, bias)

    def with_perturbation(self, key: PRNGKeyArray) -> Self:
        """**Returns:** the layer with the draw that the examples of a batch share; as it is if its
        estimator is `"local"`, which shares none.
        """
        if self.estimator == "local":
            return self
        # Layers that are stored stacked have a key each.
        shared_key = SharedKey(jr.split(key, self._stacked) if self._stacked else key)
        return tree_at(
            lambda layer: layer.shared_key, self, shared_key, is_leaf=lambda node: node is None
        )

    def _output(self, x: Array, key: PRNGKeyArray | None) -> Array:
        if self.inference:
            return self.mean_layer()(x)
        key = check_key(key, self)
        if self.estimator == "weights":
            return self.sample(key if self.shared_key is None else self.shared_key.key())(x)
        noise = self._local_noise if self.estimator == "local" else self._flipout_noise
        return self.mean_layer()(x) + noise(x, key)

    def _local_noise(self, x: Array, key: PRNGKeyArray) -> Array:
        variance = self._map_rho(lambda rho: jax.nn.softplus(rho) ** 2)
        return draw_noise(key, variance(x**2))

    def _flipout_noise(self, x: Array, key: PRNGKeyArray) -> Array:
        if self.shared_key is None:
            raise RuntimeError(
                f'{describe(self)} with estimator="flipout" needs the perturbation that the '
                "examples of a batch share: in the loss, before `jax.vmap`, write `model = "
                "nn.with_perturbation(model, key)`, with another key in each step."
            )
        keys = iter(jr.split(self.shared_key.key()))
        perturbation = self._map_rho(
            lambda rho: draw_gaussian(next(keys), jnp.zeros_like(rho), rho)
        )
        in_key, out_key = jr.split(key)
        # The sign of a bias is that of its row: it is the weight of an input that is always 1.
        y = perturbation(_random_signs(in_key, x) * x)
        return _random_signs(out_key, y) * y

    def _map_rho(self, function: Callable[[Array], Array]) -> Any:
        bias = None if self.bias_rho is None else function(self.bias_rho)
        return with_arrays(self.mean_layer(), function(self.weight_rho), bias)


def with_arrays(layer: Any, weight: Any, bias: Any) -> Any:
    """A plain layer with another weight, and another bias if it has one."""
    if bias is None:
        return tree_at(lambda layer: layer.weight, layer, weight)
    return tree_at(lambda layer: (layer.weight, layer.bias), layer, (weight, bias))


def with_posterior_scales(layer: Any, scales: Any) -> Any:
    """A `GaussianLayer` whose posterior has the standard deviations in the plain layer `scales`."""
    bias = None if layer.bias_rho is None else rho_of(scales.bias)
    return with_rhos(layer, with_arrays(scales, rho_of(scales.weight), bias))


def with_rhos(layer: Any, rhos: Any) -> Any:
    """A `GaussianLayer` whose posterior has the standard deviations `softplus(rho)`, with `rho` in
    the plain layer `rhos`.
    """
    if layer.bias_rho is None:
        return tree_at(lambda layer: layer.weight_rho, layer, rhos.weight)
    return tree_at(
        lambda layer: (layer.weight_rho, layer.bias_rho), layer, (rhos.weight, rhos.bias)
    )


def check_parts(mean: Any, scales: Any, plain: type) -> None:
    """Raises unless `mean` and `scales` are two layers of the type `plain`, of the same shapes."""
    for name, layer in (("mean", mean), ("scales", scales)):
        check_instance(layer, f"from_parts: {name}")
        if not isinstance(layer, plain):
            raise TypeError(f"{name} must be an nn.{plain.__name__}, got a {type(layer).__name__}.")
    for name in ("weight", "bias"):
        shapes = [getattr(getattr(layer, name), "shape", None) for layer in (mean, scales)]
        if shapes[0] != shapes[1]:
            expected, got = ("None" if shape is None else f"shape {shape}" for shape in shapes)
            raise ValueError(
                f"from_parts expected scales.{name} to be like mean.{name}, {expected}; got {got}."
            )


def check_estimator(estimator: Any) -> Estimator:
    """`estimator`. Raises `ValueError` for a word that is none."""
    if estimator not in get_args(Estimator):
        names = ", ".join(map(repr, get_args(Estimator)))
        raise ValueError(f"estimator must be one of {names}, got {estimator!r}.")
    return estimator


def _broadcast(scale: Array, array: Array) -> Array:
    scale = jnp.expand_dims(scale, range(scale.ndim, array.ndim))
    return jnp.broadcast_to(scale, array.shape)


def _random_signs(key: PRNGKeyArray, x: Array) -> Array:
    """Random signs that `x` can be multiplied by: one for each feature or channel."""
    shape = x.shape[:1]
    # 32 signs from each word: `jax.random.rademacher` takes a word for each, by which an ELBO step
    # of an MLP of 784 inputs took 1.8 ms in place of 1.1.
    words = jr.bits(key, (math.prod(shape) // 32 + 1, 1), jnp.uint32)
    bits = jnp.ravel(words >> jnp.arange(32, dtype=jnp.uint32)[None] & 1)
    signs = 1 - 2 * bits[: math.prod(shape)].reshape(shape).astype(x.dtype)
    return jnp.expand_dims(signs, range(len(shape), x.ndim))
