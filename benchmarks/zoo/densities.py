"""Log densities of distributions, summed over all their arguments.

Parameters are Python numbers or arrays, and scalars are broadcast. The computation has the dtype of
the arrays.
"""

import math

import jax
import jax.numpy as jnp
from jax import Array
from jax.scipy.special import gammaln
from jax.typing import ArrayLike


def normal_each(x: Array, mean: ArrayLike, scale: ArrayLike) -> Array:
    """Normal(mean, scale) at each entry of `x`."""
    return -(((x - mean) / scale) ** 2) / 2 - jnp.log(scale) - math.log(2 * math.pi) / 2


def normal(x: Array, mean: ArrayLike, scale: ArrayLike) -> Array:
    """Normal(mean, scale)."""
    return jnp.sum(normal_each(x, mean, scale))


def isotropic_normal(x: Array, mean: ArrayLike, scale: ArrayLike) -> Array:
    """Normal(mean, scale**2 I). The scale is common, so only the sum is divided."""
    constant = jnp.log(scale) + math.log(2 * math.pi) / 2
    return -jnp.sum((x - mean) ** 2) / (2 * scale**2) - x.size * constant


def half_normal(x: Array, scale: float) -> Array:
    """The absolute value of Normal(0, scale)."""
    return x.size * math.log(2) + normal(x, 0.0, scale)


def half_cauchy(x: Array, scale: float) -> Array:
    """The absolute value of Cauchy(0, scale)."""
    return jnp.sum(math.log(2 / (math.pi * scale)) - jnp.log1p((x / scale) ** 2))


def gamma(x: Array, shape: float, rate: float) -> Array:
    """Gamma(shape, rate)."""
    constant = shape * math.log(rate) - math.lgamma(shape)
    return jnp.sum(constant + (shape - 1) * jnp.log(x) - rate * x)


def poisson(counts: Array, log_rate: Array) -> Array:
    """Poisson(exp(log_rate)), for floating-point counts."""
    return jnp.sum(counts * log_rate - jnp.exp(log_rate) - gammaln(counts + 1))


def bernoulli(is_one: Array, logits: Array) -> Array:
    """Bernoulli(sigmoid(logits)), for floating-point zeros and ones."""
    return jnp.sum(is_one * logits - jax.nn.softplus(logits))


def dirichlet(probabilities: Array, concentration: float) -> Array:
    """Dirichlet(concentration, ..., concentration), for the rows of an array or for a vector."""
    size = probabilities.shape[-1]
    constant = math.lgamma(size * concentration) - size * math.lgamma(concentration)
    rows = probabilities.size // size
    return rows * constant + (concentration - 1) * jnp.sum(jnp.log(probabilities))


def lkj_cholesky(cholesky: Array, concentration: float) -> Array:
    """The LKJ density (Lewandowski, Kurowicka & Joe, 2009) of a correlation matrix's Cholesky
    factor.

    **Arguments:**

    - `cholesky`: lower triangular matrix of shape (size, size). Entries above the diagonal are not
      read.
    - `concentration`: 1 for the uniform density of correlation matrices.
    """
    size = cholesky.shape[0]
    constant = (size - 1) * math.lgamma(concentration + (size - 1) / 2)
    for order in range(1, size):
        constant -= order * math.log(math.pi) / 2
        constant -= math.lgamma(concentration + (size - 1 - order) / 2)
    exponents = jnp.array(
        [size - row + 2 * concentration - 2 for row in range(2, size + 1)], cholesky.dtype
    )
    return constant + jnp.sum(exponents * jnp.log(jnp.diagonal(cholesky)[1:]))


def correlated_normal(x: Array, cholesky: Array) -> Array:
    """Normal(0, cholesky @ cholesky.T), for the rows of `x`."""
    whitened = jax.scipy.linalg.solve_triangular(cholesky, x.T, lower=True)
    log_det = jnp.sum(jnp.log(jnp.diagonal(cholesky)))
    return normal(whitened, 0.0, 1.0) - len(x) * log_det
