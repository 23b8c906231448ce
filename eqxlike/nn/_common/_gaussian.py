"""Independent Gaussians N(mean, softplus(rho)^2), for layers with random weights."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import jax.random as jr
from jaxtyping import Array, Float, PRNGKeyArray

from ..._dtypes import at_least_float32
from ..._module import Module
from ..._pytree import is_array
from ._inputs import describe


def rho_for(scale: float, shape: tuple[int, ...], dtype: jnp.dtype) -> Float[Array, "*shape"]:
    """The `rho` of a standard deviation `scale`: the inverse of `softplus`."""
    return jnp.full(shape, scale + math.log(-math.expm1(-scale)), dtype)


def rho_of(scale: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """The `rho` of each of given standard deviations, small and large ones alike."""
    exact = scale.astype(at_least_float32(scale.dtype))
    return (exact + jnp.log(-jnp.expm1(-exact))).astype(scale.dtype)


def draw_gaussian(
    key: PRNGKeyArray, mean: Float[Array, "*shape"], rho: Float[Array, "*shape"]
) -> Float[Array, "*shape"]:
    """One draw of N(mean, softplus(rho)^2)."""
    return mean + jax.nn.softplus(rho) * jr.normal(key, mean.shape, mean.dtype)


def draw_noise(key: PRNGKeyArray, variance: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """One draw of N(0, variance), with a finite gradient where the variance is 0."""
    # A layer without bias has variance 0 at x = 0, where the gradient of the root is infinite.
    is_positive = variance > 0
    scale = jnp.where(is_positive, jnp.sqrt(jnp.where(is_positive, variance, 1)), 0)
    return scale * jr.normal(key, scale.shape, scale.dtype)


def scale_of_each(scale: Any, stacked: tuple[int, ...]) -> Any:
    """A prior scale for each of layers that are stored stacked, so that an array of shape `()` is
    one among theirs; a number is a constant of all.
    """
    return jnp.broadcast_to(scale, stacked) if is_array(scale) and stacked else scale


def gaussian_kl(
    mean: Float[Array, "*shape"],
    rho: Float[Array, "*shape"],
    prior_scale: Float[Array, "*stacked"],
) -> Float[Array, ""]:
    """KL(N(mean, softplus(rho)^2) || N(0, prior_scale^2)), summed, in at least float32.

    With `s = softplus(rho)` each entry gives `log(p / s) + (s^2 + m^2) / (2 p^2) - 1/2`. A sum over
    many weights loses digits in less than float32. `prior_scale` is of shape `()`, or has the
    leading axes of layers that are stored stacked.
    """
    dtype = at_least_float32(mean.dtype)
    mean, rho, prior = mean.astype(dtype), rho.astype(dtype), prior_scale.astype(dtype)
    prior = jnp.expand_dims(prior, range(prior.ndim, mean.ndim))
    scale = jax.nn.softplus(rho)
    # Below -40 log(softplus(rho)) = rho - exp(rho) / 2 + ... is rho to the last digit of a float64,
    # finite where the scale underflows to 0. The inner `where` keeps the 0 / 0 of an underflow out
    # of the gradient.
    is_tiny = rho < -40
    log_scale = jnp.where(is_tiny, rho, jnp.log(jnp.where(is_tiny, 1, scale)))
    ratio = (scale / prior) ** 2 + (mean / prior) ** 2
    return jnp.sum(jnp.log(prior) - log_scale + (ratio - 1) / 2)


def check_key(key: PRNGKeyArray | None, layer: Module) -> PRNGKeyArray:
    """`key`. Raises `RuntimeError`, with the ways out, if there is none."""
    if key is None:
        raise RuntimeError(
            f"{describe(layer)} needs a key outside inference mode: write `layer(x, key=key)`, use "
            "the posterior mean with `nn.inference_mode(model)`, or draw a network with "
            "`nn.sample_posterior(model, key)`."
        )
    return key


def check_real_floating(dtype: jnp.dtype, layer_name: str) -> None:
    """Raises `TypeError` for a dtype that no Gaussian here has."""
    if not jnp.issubdtype(dtype, jnp.floating):
        raise TypeError(f"{layer_name} needs a real floating dtype, got {dtype}.")
