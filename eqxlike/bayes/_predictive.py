"""The posterior predictive distribution, by Monte Carlo over networks.

`S` networks are drawn from the posterior; the predictive distribution is the mixture, with equal
weights, of what each predicts. `B` is the number of inputs, `C` the number of classes.
"""

from collections.abc import Callable
from typing import Any, Concatenate, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import jax.random as jr
from jax.scipy.special import logsumexp, ndtr, ndtri
from jax.scipy.stats import norm
from jaxtyping import Array, Float, PRNGKeyArray, PyTree, Shaped

from .._numbers import whole_number
from ..nn import sample_posterior

Output = TypeVar("Output")


def predict_samples(
    model: Callable[Concatenate[Any, ...], Output],
    inputs: PyTree[Shaped[Array, "B ..."]],
    *,
    key: PRNGKeyArray,
    num_samples: int,
) -> Output:
    """Outputs of `S` networks drawn from the posterior, each applied to all inputs.

    **Arguments:**

    - `model`: called as `network(input)` on one example, after every `nn.BayesianLayer` in it has
      been replaced by a draw. Put other random layers in inference mode.
    - `inputs`: arrays with leading axis B.
    - `key`: for the draws.
    - `num_samples`: S.

    **Returns:** outputs with leading axes S, B.

    **Raises:** `ValueError` if `num_samples` is not a positive integer.

    >>> import jax, jax.numpy as jnp
    >>> from eqxlike import nn
    >>> model = nn.BayesianMLP(2, 3, width_size=8, depth=1, key=jax.random.key(0))
    >>> predict_samples(model, jnp.ones((5, 2)), key=jax.random.key(1), num_samples=10).shape
    (10, 5, 3)
    """

    def one(key: PRNGKeyArray) -> Any:
        network = sample_posterior(model, key)
        return jax.vmap(lambda example: network(example))(inputs)

    return jax.vmap(one)(jr.split(key, whole_number(num_samples, "num_samples")))


class GaussianMoments(NamedTuple):
    """Mean and variance of a mixture of Gaussians, the variance split by the law of total variance.

    Kendall & Gal (2017), "What Uncertainties Do We Need in Bayesian Deep Learning for Computer
    Vision?"

    - `mean`: of the mixture.
    - `epistemic`: variance of the means, which more data removes.
    - `aleatoric`: mean of the variances, which no data removes.
    """

    mean: Float[Array, "*B"]
    epistemic: Float[Array, "*B"]
    aleatoric: Float[Array, "*B"]

    @property
    def variance(self) -> Float[Array, "*B"]:
        """The variance of the mixture, `epistemic + aleatoric`."""
        return self.epistemic + self.aleatoric


def _scales(means: Array, scales: Any) -> Array:
    """`scales` as an array of the shape and dtype of `means`."""
    scales = jnp.asarray(scales, means.dtype)
    if scales.ndim not in (0, means.ndim):
        raise ValueError(
            f"scales must have shape () or as many axes as means of shape {means.shape}, got shape "
            f"{scales.shape}."
        )
    return jnp.broadcast_to(scales, means.shape)


def gaussian_mixture_moments(
    means: Float[Array, "S *B"], scales: Float[Array, "#S *#B"] | float
) -> GaussianMoments:
    """The mean of an equal mixture of S Gaussians, and its epistemic and aleatoric variance.

    **Arguments:**

    - `means`: shape `(S, *B)`.
    - `scales`: standard deviations, shape `()` or one that broadcasts to `means` axis by axis.

    **Returns:** a `GaussianMoments`, its arrays of shape `(*B)`.

    **Raises:** `ValueError` if `scales` has another number of axes.

    >>> import jax.numpy as jnp
    >>> moments = gaussian_mixture_moments(jnp.array([[0.0], [2.0]]), 1.0)
    >>> [float(part[0]) for part in moments]
    [1.0, 1.0, 1.0]
    """
    scales = _scales(means, scales)
    return GaussianMoments(
        jnp.mean(means, axis=0), jnp.var(means, axis=0), jnp.mean(scales**2, axis=0)
    )


def gaussian_mixture_log_density(
    y: Float[Array, "*B"], means: Float[Array, "S *B"], scales: Float[Array, "#S *#B"] | float
) -> Float[Array, "*B"]:
    """The log density at `y` of an equal mixture of S Gaussians.

    **Arguments:**

    - `y`: shape `(*B)`.
    - `means`, `scales`: as for `gaussian_mixture_moments`.

    **Returns:** shape `(*B)`, in nats: of a density in the unit of `y`.

    >>> import jax.numpy as jnp
    >>> value = gaussian_mixture_log_density(jnp.zeros(1), jnp.zeros((7, 1)), 1.0)[0]
    >>> round(float(value), 4)
    -0.9189
    """
    terms = norm.logpdf(jnp.expand_dims(y, 0), means, _scales(means, scales))
    return logsumexp(terms, axis=0) - jnp.log(jnp.asarray(means.shape[0], terms.dtype))


def gaussian_mixture_cdf(
    y: Float[Array, "*B"], means: Float[Array, "S *B"], scales: Float[Array, "#S *#B"] | float
) -> Float[Array, "*B"]:
    """The probability of at most `y` under an equal mixture of S Gaussians.

    **Arguments:**

    - `y`: shape `(*B)`.
    - `means`, `scales`: as for `gaussian_mixture_moments`.

    **Returns:** shape `(*B)`, between 0 and 1.

    >>> import jax.numpy as jnp
    >>> float(gaussian_mixture_cdf(jnp.zeros(1), jnp.array([[-2.0], [2.0]]), 1.0)[0])
    0.5
    """
    return jnp.mean(ndtr((jnp.expand_dims(y, 0) - means) / _scales(means, scales)), axis=0)


def gaussian_mixture_quantile(
    probability: float | Float[Array, ""],
    means: Float[Array, "S *B"],
    scales: Float[Array, "#S *#B"] | float,
) -> Float[Array, "*B"]:
    """The `probability` quantile of an equal mixture of S Gaussians, by bisection of its CDF.

    The quantile of a mixture lies between the least and the greatest quantile of its components,
    where the bisection starts; it ends where halving no longer changes a number of that dtype.

    **Arguments:**

    - `probability`: in (0, 1).
    - `means`, `scales`: as for `gaussian_mixture_moments`.

    **Returns:** shape `(*B)`, in the unit of `means`.

    >>> import jax.numpy as jnp
    >>> round(float(gaussian_mixture_quantile(0.975, jnp.zeros((3, 1)), 1.0)[0]), 3)
    1.96
    """
    dtype = means.dtype
    return _bisect(jnp.asarray(probability, dtype), means, _scales(means, scales))


# Jitted, so that a call outside jit does not compile the loop anew: 0.8 s against 3 ms (100 x 90).
@jax.jit
def _bisect(probability: Array, means: Array, scales: Array) -> Array:
    component_quantiles = means + scales * ndtri(probability)

    def halve(_: int, bounds: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = bounds
        middle = low + (high - low) / 2
        is_below = gaussian_mixture_cdf(middle, means, scales) < probability
        return jnp.where(is_below, middle, low), jnp.where(is_below, high, middle)

    bounds = (jnp.min(component_quantiles, axis=0), jnp.max(component_quantiles, axis=0))
    num_halvings = jnp.finfo(means.dtype).nmant + 8
    low, high = jax.lax.fori_loop(0, num_halvings, halve, bounds)
    return low + (high - low) / 2


def gaussian_mixture_interval(
    means: Float[Array, "S *B"], scales: Float[Array, "#S *#B"] | float, *, level: float = 0.9
) -> tuple[Float[Array, "*B"], Float[Array, "*B"]]:
    """The central interval that holds probability `level` under an equal mixture of S Gaussians.

    **Arguments:**

    - `means`, `scales`: as for `gaussian_mixture_moments`.
    - `level`: in (0, 1).

    **Returns:** its lower and upper ends, with `(1 - level) / 2` beyond each.

    **Raises:** `ValueError` unless `0 < level < 1`.
    """
    if not 0 < level < 1:
        raise ValueError(f"level must lie in (0, 1), got {level!r}.")
    tail = (1 - level) / 2
    return (
        gaussian_mixture_quantile(tail, means, scales),
        gaussian_mixture_quantile(1 - tail, means, scales),
    )


def categorical_mixture_log_probabilities(logits: Float[Array, "S *B C"]) -> Float[Array, "*B C"]:
    """The log probabilities of an equal mixture of S categorical distributions.

    Probabilities are averaged, not logits.

    **Arguments:**

    - `logits`: of the S distributions, shape `(S, *B, C)`.

    **Returns:** shape `(*B, C)`.

    >>> import jax.numpy as jnp
    >>> logits = jnp.array([[[0.0, 0.0]], [[100.0, 0.0]]])
    >>> jnp.exp(categorical_mixture_log_probabilities(logits))[0].tolist()
    [0.75, 0.25]
    """
    log_probabilities = jax.nn.log_softmax(logits, axis=-1)
    count = jnp.asarray(logits.shape[0], logits.dtype)
    return logsumexp(log_probabilities, axis=0) - jnp.log(count)


class CategoricalUncertainty(NamedTuple):
    """The entropy of a mixture of categorical distributions and its two parts, in nats.

    Depeweg, Hernández-Lobato, Doshi-Velez & Udluft (2018), "Decomposition of Uncertainty in
    Bayesian Deep Learning".

    - `total`: entropy of the mixture, `epistemic + aleatoric`.
    - `epistemic`: mutual information of label and network.
    - `aleatoric`: mean entropy of the components.
    """

    total: Float[Array, "*B"]
    epistemic: Float[Array, "*B"]
    aleatoric: Float[Array, "*B"]


def _entropy(log_probabilities: Float[Array, "*B C"]) -> Float[Array, "*B"]:
    # 0 log 0 = 0: where the log underflowed to -inf the product would be NaN.
    probabilities = jnp.exp(log_probabilities)
    is_positive = probabilities > 0
    terms = jnp.where(is_positive, probabilities * jnp.where(is_positive, log_probabilities, 0), 0)
    return -jnp.sum(terms, axis=-1)


def categorical_uncertainty(logits: Float[Array, "S *B C"]) -> CategoricalUncertainty:
    """The predictive entropy, split into what more data would and would not remove.

    **Arguments:**

    - `logits`: of S categorical distributions in an equal mixture, shape `(S, *B, C)`.

    **Returns:** a `CategoricalUncertainty`, its arrays of shape `(*B)`, in nats.

    >>> import jax.numpy as jnp
    >>> parts = categorical_uncertainty(jnp.array([[[200.0, 0.0]], [[0.0, 200.0]]]))
    >>> [round(float(part[0]), 4) for part in parts]
    [0.6931, 0.6931, 0.0]
    """
    total = _entropy(categorical_mixture_log_probabilities(logits))
    aleatoric = jnp.mean(_entropy(jax.nn.log_softmax(logits, axis=-1)), axis=0)
    return CategoricalUncertainty(total, jnp.maximum(total - aleatoric, 0), aleatoric)
