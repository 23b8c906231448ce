"""`Mean`, an average over batches, and the metrics that return a `Mean`."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from .. import Module, field
from .._dtypes import at_least_float32


def _itself(mean: Array) -> Array:
    return mean


class Mean(Module):
    """A weighted mean over examples, and a function that maps the mean to a metric. The means of
    several batches can be merged.

    - `total`: shape `()`, the weighted sum of the values.
    - `weight`: shape `()`, the sum of the weights. If all weights are 1, this is the number of
      examples.
    - `finish`: function that maps the mean to the metric, such as the square root for the RMSE.

    >>> import jax.numpy as jnp
    >>> from eqxlike.train import metrics
    >>> first, second = metrics.mean(jnp.array([1.0, 2.0])), metrics.mean(jnp.array([6.0]))
    >>> float(first.merge(second).value)
    3.0
    """

    total: Float[Array, ""]
    weight: Float[Array, ""]
    finish: Callable[[Array], Array] = field(static=True, default=_itself)

    def merge(self, other: "Mean") -> "Mean":
        """The mean over the examples of both means.

        **Raises:** `ValueError` if the two means have a different `finish`.
        """
        if self.finish is not other.finish:
            raise ValueError(
                "Only means of one metric can be merged; the functions `finish` of these are "
                f"{self.finish.__name__} and {other.finish.__name__}."
            )
        return Mean(self.total + other.total, self.weight + other.weight, self.finish)

    @property
    def value(self) -> Float[Array, ""]:
        """The metric; NaN if the weight is 0."""
        return self.finish(self.total / self.weight)


def mean(
    values: Float[Array, "*shape"],
    weights: Float[Array, "*shape"] | None = None,
    finish: Callable[[Array], Array] = _itself,
) -> Mean:
    """The weighted mean of values. There is one value for each example, token or pixel.

    **Arguments:**

    - `values`: array of any shape. The sum is computed in float32 or a wider dtype.
    - `weights`: weight of each value, broadcast to the shape of `values`. The default is 1. Use 0
      for padding; a value of weight 0 may be NaN.
    - `finish`: function that maps the mean to the metric. It needs a `__name__`. Pass the same
      function object for all batches.

    **Raises:** `ValueError` if the weights do not broadcast to the shape of the values.

    >>> float(mean(jnp.array([1.0, 5.0, jnp.nan]), jnp.array([3.0, 1.0, 0.0])).value)
    2.0
    """
    values = _in_full(values)
    if weights is None:
        return Mean(jnp.sum(values), jnp.full((), values.size, values.dtype), finish)
    weights = jnp.asarray(weights).astype(values.dtype)
    try:
        weights = jnp.broadcast_to(weights, values.shape)
    except ValueError as error:
        raise ValueError(
            f"mean expected weights that broadcast to the shape of the values, {values.shape}; got "
            f"weights of shape {weights.shape}."
        ) from error
    counted = jnp.where(weights == 0, jnp.zeros_like(values), values * weights)
    return Mean(jnp.sum(counted), jnp.sum(weights), finish)


def accuracy(
    logits: Float[Array, "*shape C"],
    labels: Int[Array, "*shape"],
    weights: Float[Array, "*shape"] | None = None,
) -> Mean:
    """The fraction of examples whose most probable class is the label.

    **Arguments:**

    - `logits`: logits or probabilities of C classes.
    - `labels`: integers from 0 to C - 1, or booleans.
    - `weights`: as for `mean`.

    **Raises:** `ValueError` if the shapes do not fit, or the labels are not integers.

    >>> float(accuracy(jnp.array([[2.0, 1.0], [0.0, 3.0]]), jnp.array([0, 0])).value)
    0.5
    """
    labels = _as_classes("accuracy", logits, labels)
    is_right = jnp.argmax(logits, axis=-1) == labels
    return mean(is_right.astype(jnp.float32), weights)


def perplexity(
    logits: Float[Array, "*shape C"],
    labels: Int[Array, "*shape"],
    weights: Float[Array, "*shape"] | None = None,
) -> Mean:
    """The exponential of the mean cross-entropy in nats. It is C for a uniform prediction.

    **Arguments:**

    - `logits`: logits of C classes.
    - `labels`: integers from 0 to C - 1, or booleans.
    - `weights`: as for `mean`.

    **Raises:** `ValueError` if the shapes do not fit, or the labels are not integers.

    >>> round(float(perplexity(jnp.zeros((2, 7)), jnp.array([0, 6])).value), 4)
    7.0
    """
    labels = _as_classes("perplexity", logits, labels)
    log_probabilities = jax.nn.log_softmax(_in_full(logits), axis=-1)
    of_labels = jnp.take_along_axis(log_probabilities, labels[..., None], axis=-1)
    return mean(-of_labels[..., 0], weights, jnp.exp)


def rmse(
    predictions: Float[Array, "*shape"],
    targets: Float[Array, "*shape"],
    weights: Float[Array, "*shape"] | None = None,
) -> Mean:
    """The root of the mean squared error, in the unit of the targets.

    **Raises:** `ValueError` if the shapes are not the same.

    >>> round(float(rmse(jnp.array([1.0, 2.0]), jnp.array([1.0, 4.0])).value), 4)
    1.4142
    """
    if jnp.shape(predictions) != jnp.shape(targets):
        raise ValueError(
            f"rmse expected predictions of the same shape as the targets, {jnp.shape(targets)}; "
            f"got {jnp.shape(predictions)}."
        )
    return mean(jnp.abs(_in_full(predictions) - _in_full(targets)) ** 2, weights, jnp.sqrt)


def _in_full(array: Any) -> Array:
    """Converts integers and 16-bit floats to float32, because long sums in 16 bits stop growing."""
    array = jnp.asarray(array)
    is_inexact = jnp.issubdtype(array.dtype, jnp.inexact)
    return array.astype(at_least_float32(array.dtype) if is_inexact else jnp.float32)


def _as_classes(name: str, logits: Any, labels: Any) -> Int[Array, "*shape"]:
    """Checks the labels of a metric. Converts booleans to 0 and 1."""
    labels = jnp.asarray(labels)
    labels = labels.astype(jnp.int32) if labels.dtype == jnp.bool_ else labels
    if not jnp.issubdtype(labels.dtype, jnp.integer):
        raise ValueError(
            f"{name} expected the labels to be integers of at least 0, got {labels.dtype}. Take "
            "the argmax of one-hot labels."
        )
    if jnp.shape(logits)[:-1] != jnp.shape(labels) or jnp.ndim(logits) == 0:
        raise ValueError(
            f"{name} expected logits of the shape of the labels plus a last axis for classes; got "
            f"logits of shape {jnp.shape(logits)} and labels of shape {jnp.shape(labels)}."
        )
    return labels
