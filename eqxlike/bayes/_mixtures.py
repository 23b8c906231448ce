"""Predictive distributions: equally weighted mixtures over the networks of a posterior."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.special import logsumexp
from jaxtyping import Array, Float, Int

from .. import Module
from .._compat import Tracer
from ._libraries import Missing, as_libraries_compute, check_distribution


class Mixture(Module):
    """A mixture of `S` distributions over numbers, with equal weights.

    Each of `S` networks drawn from a posterior predicts a distribution, and their mixture is the
    predictive distribution. By the law of total variance, its variance has an epistemic and an
    aleatoric part (Kendall and Gal, 2017, "What Uncertainties Do We Need in Bayesian Deep Learning
    for Computer Vision?").

    - `components`: a NumPyro distribution over numbers with batch shape `(S, *B)`.

    **Raises:** `ValueError` if `components` has no batch axis, or has a non-empty event shape.

    >>> import jax.numpy as jnp, numpyro.distributions as dist
    >>> mixture = Mixture(dist.Normal(jnp.array([[0.0], [2.0]]), 1.0))
    >>> float(mixture.mean[0]), float(mixture.epistemic[0]), float(mixture.aleatoric[0])
    (1.0, 1.0, 1.0)
    """

    components: Any

    def __check_init__(self):
        check_distribution(self.components, "Mixture: components")
        batch, event = self.components.batch_shape, self.components.event_shape
        if not batch or event:
            raise ValueError(
                "Mixture expects a distribution over numbers with a leading batch axis of "
                f"components; got batch shape {batch} and event shape {event}."
            )

    @property
    def num_components(self) -> int:
        """The number of components, `S`."""
        return self.components.batch_shape[0]

    @property
    def batch_shape(self) -> tuple[int, ...]:
        """The shape of the targets, `*B`."""
        return self.components.batch_shape[1:]

    @property
    def mean(self) -> Float[Array, "*B"]:
        """The mean, in the unit of the targets."""
        return jnp.mean(self._moment("mean"), axis=0)

    @property
    def epistemic(self) -> Float[Array, "*B"]:
        """The variance of the components' means. More data make it smaller."""
        return jnp.var(self._moment("mean"), axis=0)

    @property
    def aleatoric(self) -> Float[Array, "*B"]:
        """The mean of the components' variances. More data do not make it smaller."""
        return jnp.mean(self._moment("variance"), axis=0)

    @property
    def variance(self) -> Float[Array, "*B"]:
        """The total variance, `epistemic + aleatoric`."""
        return self.epistemic + self.aleatoric

    def log_prob(self, y: Float[Array, "*B"]) -> Float[Array, "*B"]:
        """The log density at `y`, in nats. The density is per unit of `y`.

        **Raises:** `ValueError` if the shape of `y` is not `batch_shape`; `y` is not broadcast.
        """
        return _mixed(self.component_log_prob(y))

    def component_log_prob(self, y: Float[Array, "*B"]) -> Float[Array, "S *B"]:
        """The log density at `y` under each component, in nats.

        **Raises:** `ValueError` if the shape of `y` is not `batch_shape`; `y` is not broadcast.
        """
        return self._of_each("log_prob", y)

    def cdf(self, y: Float[Array, "*B"]) -> Float[Array, "*B"]:
        """The cumulative distribution function: the probability of values up to `y`.

        **Raises:** `ValueError` if the shape of `y` is not `batch_shape`; `y` is not broadcast.
        """
        return jnp.mean(self._of_each("cdf", y), axis=0)

    def quantile(self, probability: float | Float[Array, ""]) -> Float[Array, "*B"]:
        """The quantile function, by bisection of the CDF.

        **Arguments:**

        - `probability`: one number in the open interval (0, 1).

        **Raises:** `ValueError` for several numbers, or for a Python or NumPy number outside (0,
        1).
        """
        if jnp.ndim(probability):
            raise ValueError(
                f"quantile expects one probability, got shape {jnp.shape(probability)}. For "
                "several, use `jax.vmap(mixture.quantile)(probabilities)`."
            )
        if isinstance(probability, int | float | np.generic) and not 0 < probability < 1:
            raise ValueError(f"probability must lie in (0, 1), got {probability!r}.")
        return _bisect(self, jnp.asarray(probability, self._moment_if_any("mean").dtype))

    def interval(self, level: float = 0.9) -> tuple[Float[Array, "*B"], Float[Array, "*B"]]:
        """The ends of the central interval with probability `level`.

        **Raises:** `ValueError` unless `0 < level < 1`.
        """
        if not 0 < level < 1:
            raise ValueError(f"level must lie in (0, 1), got {level!r}.")
        tail = (1 - level) / 2
        return self.quantile(tail), self.quantile(1 - tail)

    def _moment(self, name: str) -> Float[Array, "S *B"]:
        return as_floating(jnp.broadcast_to(self._ask(name), self.components.batch_shape))

    def _moment_if_any(self, name: str) -> Float[Array, "S *B"]:
        """The moment, or NaN if NumPyro does not implement it."""
        try:
            return self._moment(name)
        except NotImplementedError:
            return jnp.full(self.components.batch_shape, jnp.nan)

    def _of_each(self, method: str, y: Array) -> Float[Array, "S *B"]:
        if jnp.shape(y) != self.batch_shape:
            raise ValueError(
                f"Mixture.{method} expects y of the mixture's shape, {self.batch_shape}, got "
                f"{jnp.shape(y)}."
            )
        if method == "cdf" and self.components.is_discrete:
            # Some discrete distributions of NumPyro interpolate their CDF between integers.
            y = jnp.floor(y)
        y = jnp.asarray(y)[None]
        found = self._ask(method, y)
        if method != "cdf":
            return found
        # NumPyro's CDF may be NaN outside the support, where the true CDF is 0 or 1.
        mean = self._moment_if_any("mean")
        is_outside = jnp.isnan(found) & jnp.isfinite(mean) & ~jnp.isnan(y)
        return jnp.where(is_outside, (y > mean).astype(found.dtype), found)

    def _ask(self, what: str, *arguments: Array) -> Array:
        """A property of NumPyro's distribution, or the result of its method.

        NumPyro's `NotImplementedError` has no message, so it is replaced by a clear error.
        """
        try:
            with as_libraries_compute():
                found = getattr(self.components, what)
                return found(*arguments) if arguments else found
        except NotImplementedError as error:
            raise Missing(
                f"Mixture: NumPyro's {type(self.components).__name__} does not implement {what!r}, "
                "which is needed here. Use draws instead: `components.sample(key, (1000,))` has "
                f"shape {(1000, *self.components.batch_shape)}; compute means and quantiles over "
                "its first two axes. `bayes.metrics.crps(y, mixture, key=key)` also needs only "
                "draws."
            ) from error


# Jitted, so that calls outside jit do not compile the loops again. The functions below are jitted
# so that calls outside jit do not compile each operation.
@jax.jit
def _bisect(mixture: Mixture, probability: Float[Array, ""]) -> Float[Array, "*B"]:
    # The mean or the variance may be NaN, because some distributions have none.
    means, variances = (mixture._moment_if_any(name) for name in ("mean", "variance"))
    mean = jnp.mean(means, axis=0)
    spread = jnp.sqrt(jnp.var(means, axis=0) + jnp.mean(variances, axis=0))
    mean = jnp.where(jnp.isfinite(mean), mean, 0)
    spread = jnp.where(jnp.isfinite(spread) & (spread > 0), spread, 1)

    def beyond(sign: int) -> Float[Array, "*B"]:
        """A number below (`sign = -1`) or above (`sign = 1`) the quantile."""

        def is_short(width: Array) -> Array:
            below = mixture.cdf(mean + sign * width)
            return (below < probability) if sign > 0 else (below >= probability)

        def widen(width: Array) -> Array:
            return jnp.where(is_short(width), 2 * width, width)

        width = jax.lax.fori_loop(0, _MAX_DOUBLINGS, lambda _, width: widen(width), spread)
        return mean + sign * width

    def halve(_: int, bounds: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = bounds
        middle = low + (high - low) / 2
        is_below = mixture.cdf(middle) < probability
        return jnp.where(is_below, middle, low), jnp.where(is_below, high, middle)

    num_halvings = jnp.finfo(mean.dtype).nmant + 8
    low, high = jax.lax.fori_loop(0, num_halvings, halve, (beyond(-1), beyond(1)))
    return jnp.round(high) if mixture.components.is_discrete else low + (high - low) / 2


_MAX_DOUBLINGS = math.ceil(math.log2(1e6))


@jax.jit
def _mixed(terms: Float[Array, "S *B"]) -> Float[Array, "*B"]:
    """Log of the mean of `exp(terms)` over the first axis."""
    return logsumexp(terms, axis=0) - jnp.log(jnp.asarray(terms.shape[0], terms.dtype))


# --- Equal mixtures of categorical distributions ---


class CategoricalMixture(Module):
    """A mixture of `S` categorical distributions over `C` classes, with equal weights.

    Probabilities are averaged, not logits. The entropy has an epistemic and an aleatoric part
    (Depeweg, Hernández-Lobato, Doshi-Velez and Udluft, 2018, "Decomposition of Uncertainty in
    Bayesian Deep Learning").

    - `logits`: shape `(S, *B, C)`.

    >>> import jax.numpy as jnp
    >>> mixture = CategoricalMixture(jnp.array([[[200.0, 0.0]], [[0.0, 200.0]]]))
    >>> mixture.probabilities.tolist()
    [[0.5, 0.5]]
    >>> round(float(mixture.epistemic[0]), 4), round(float(mixture.aleatoric[0]), 4)
    (0.6931, 0.0)
    """

    logits: Float[Array, "S *B C"]

    def __check_init__(self):
        if jnp.ndim(self.logits) < 2:
            raise ValueError(
                "CategoricalMixture expects logits of shape (S, *B, C), got shape "
                f"{jnp.shape(self.logits)}."
            )

    @property
    def batch_shape(self) -> tuple[int, ...]:
        """The shape of the targets, `*B`."""
        return jnp.shape(self.logits)[1:-1]

    @property
    def log_probabilities(self) -> Float[Array, "*B C"]:
        """The logarithms of `probabilities`."""
        return _mixed(jax.nn.log_softmax(self.logits, axis=-1))

    @property
    def probabilities(self) -> Float[Array, "*B C"]:
        """The probability of each class."""
        return jnp.exp(self.log_probabilities)

    def log_prob(self, y: Int[Array, "*B"]) -> Float[Array, "*B"]:
        """The log probability of the classes `y`, in nats.

        **Raises:** `ValueError` if the shape of `y` is not `batch_shape` (`y` is not broadcast), or
        if `y` has a value that is not a class. Under `jit`, values are not checked.
        """
        return _mixed(self.component_log_prob(y))

    def component_log_prob(self, y: Int[Array, "*B"]) -> Float[Array, "S *B"]:
        """The log probability of `y` under each component, in nats.

        **Raises:** `ValueError` if the shape of `y` is not `batch_shape`; `y` is not broadcast.
        """
        if np.shape(y) != self.batch_shape:
            raise ValueError(
                "CategoricalMixture.log_prob expects y of the shape of the prediction, "
                f"{self.batch_shape}, got {np.shape(y)}."
            )
        classes = as_classes(y)
        check_classes(classes, jnp.shape(self.logits)[-1], "CategoricalMixture.log_prob")
        terms = jax.nn.log_softmax(self.logits, axis=-1)
        return jnp.take_along_axis(terms, classes[None, ..., None], axis=-1)[..., 0]

    @property
    def entropy(self) -> Float[Array, "*B"]:
        """The entropy in nats, `epistemic + aleatoric`."""
        return _entropy(self.log_probabilities)

    @property
    def epistemic(self) -> Float[Array, "*B"]:
        """The mutual information of class and component, in nats. More data make it smaller."""
        return jnp.maximum(self.entropy - self.aleatoric, 0)

    @property
    def aleatoric(self) -> Float[Array, "*B"]:
        """The mean entropy of the components, in nats. More data do not make it smaller."""
        return jnp.mean(_entropy(jax.nn.log_softmax(self.logits, axis=-1)), axis=0)


@jax.jit
def _entropy(log_probabilities: Float[Array, "*B C"]) -> Float[Array, "*B"]:
    # 0 log 0 = 0. Without `where`, 0 times -inf would give NaN.
    probabilities = jnp.exp(log_probabilities)
    is_positive = probabilities > 0
    terms = jnp.where(is_positive, probabilities * jnp.where(is_positive, log_probabilities, 0), 0)
    return -jnp.sum(terms, axis=-1)


# --- Checks of labels and predictions ---


def as_floating(values: Any) -> Array:
    """Values as an array, with integers converted to floating-point numbers."""
    values = jnp.asarray(values)
    return values if jnp.issubdtype(values.dtype, jnp.floating) else values.astype(float)


def as_classes(labels: Any) -> Array:
    """Labels as an array, with booleans converted to integers."""
    if not isinstance(labels, jax.Array) and (dtype := np.asarray(labels).dtype).kind in "OSU":
        raise TypeError(
            f"Expected labels that are numbers or booleans, got dtype {dtype}. Convert class names "
            "to integers by `np.unique(labels, return_inverse=True)[1]`."
        )
    labels = jnp.asarray(labels)
    return labels.astype(jnp.int32) if labels.dtype == jnp.bool_ else labels


def check_classes(labels: Array, num_classes: int, name: str) -> None:
    """Raises `ValueError` unless labels are integers from 0 to `num_classes - 1`.

    The values of traced labels, and of labels on several hosts, are not checked.
    """
    if not jnp.issubdtype(labels.dtype, jnp.integer):
        raise ValueError(
            f"{name} expects integer labels, got dtype {labels.dtype}. Pass `y.astype(int)`."
        )
    if isinstance(labels, Tracer) or not (labels.size and labels.is_fully_addressable):
        return
    least, most = int(np.min(labels)), int(np.max(labels))
    if least < 0 or most >= num_classes:
        raise ValueError(
            f"{name} expects labels from 0 to {num_classes - 1}, got labels from {least} to {most}."
        )


def check_mixture(prediction: Any, kind: type[Any], caller: str) -> None:
    """Raises `TypeError` unless `prediction` is a mixture of type `kind`.

    The message names `caller`.
    """
    if not isinstance(prediction, kind):
        one = "dist.Normal(mean[None], scale)" if kind is Mixture else "logits[None]"
        raise TypeError(
            f"{caller} expects a bayes.{kind.__name__}, got {type(prediction).__name__}. For the "
            f"prediction of a single network, pass bayes.{kind.__name__}({one})."
        )
