"""Measures of predictions: how good they are, and whether their probabilities hold.

`N` is the number of examples, `C` the number of classes.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax.scipy.stats import norm
from jaxtyping import Array, Float, Int, Shaped

from .._numbers import whole_number


def _check_same_shape(**arrays: Array) -> None:
    shapes = {name: jnp.shape(array) for name, array in arrays.items()}
    if len(set(shapes.values())) != 1:
        listed = ", ".join(f"{name} {shape}" for name, shape in shapes.items())
        raise ValueError(f"Expected arrays of one shape, got {listed}.")


def _check_classification(scores: Array, labels: Array, name: str) -> None:
    shape, label_shape = jnp.shape(scores), jnp.shape(labels)
    if len(shape) != 2 or label_shape != shape[:1]:
        raise ValueError(
            f"Expected {name} of shape (N, C) and labels of shape (N,), got {shape} and "
            f"{label_shape}."
        )
    if not jnp.issubdtype(jnp.result_type(labels), jnp.integer):
        raise ValueError(f"Expected integer labels, got dtype {jnp.result_type(labels)}.")


def root_mean_squared_error(
    y: Float[Array, "*N"], prediction: Float[Array, "*N"]
) -> Float[Array, ""]:
    """The root mean squared error, `sqrt(mean((y - prediction)^2))`.

    **Arguments:**

    - `y`, `prediction`: arrays of one shape, in one unit.

    **Returns:** shape `()`, in the unit of `y`.

    **Raises:** `ValueError` if the shapes differ.

    >>> import jax.numpy as jnp
    >>> float(root_mean_squared_error(jnp.array([1.0, 2.0]), jnp.array([3.0, 4.0])))
    2.0
    """
    _check_same_shape(y=y, prediction=prediction)
    return jnp.sqrt(jnp.mean((jnp.asarray(y) - jnp.asarray(prediction)) ** 2))


def gaussian_nll(
    y: Float[Array, "*N"], mean: Float[Array, "*N"], scale: Float[Array, "*N"]
) -> Float[Array, ""]:
    """The mean negative log density of `y` under N(mean, scale^2).

    For a mixture of networks see `gaussian_mixture_log_density`.

    **Arguments:**

    - `y`, `mean`, `scale`: arrays of one shape, in one unit; `scale` is the standard deviation.

    **Returns:** shape `()`, in nats: of a density in the unit of `y`.

    **Raises:** `ValueError` if the shapes differ.

    >>> import jax.numpy as jnp
    >>> round(float(gaussian_nll(jnp.zeros(3), jnp.zeros(3), jnp.ones(3))), 4)
    0.9189
    """
    _check_same_shape(y=y, mean=mean, scale=scale)
    return -jnp.mean(norm.logpdf(y, mean, scale))


def interval_coverage(
    y: Float[Array, "*N"], lower: Float[Array, "*N"], upper: Float[Array, "*N"]
) -> Float[Array, ""]:
    """The fraction of `y` within `[lower, upper]`.

    **Arguments:**

    - `y`, `lower`, `upper`: arrays of one shape, in one unit.

    **Returns:** shape `()`, between 0 and 1.

    **Raises:** `ValueError` if the shapes differ.

    >>> import jax.numpy as jnp
    >>> y = jnp.array([1.0, 2.0, 3.0, 4.0])
    >>> float(interval_coverage(y, jnp.zeros(4), jnp.full(4, 3.0)))
    0.75
    """
    _check_same_shape(y=y, lower=lower, upper=upper)
    y, lower, upper = jnp.asarray(y), jnp.asarray(lower), jnp.asarray(upper)
    return jnp.mean((lower <= y) & (y <= upper), dtype=y.dtype)


def accuracy(scores: Float[Array, "N C"], labels: Int[Array, " N"]) -> Float[Array, ""]:
    """The fraction of examples whose greatest score is at the label.

    **Arguments:**

    - `scores`: logits or probabilities, shape `(N, C)`.
    - `labels`: integers from 0 to C - 1, shape `(N,)`.

    **Returns:** shape `()`, between 0 and 1.

    **Raises:** `ValueError` for other shapes, or labels that are no integers.

    >>> import jax.numpy as jnp
    >>> float(accuracy(jnp.array([[0.9, 0.1], [0.2, 0.8]]), jnp.array([0, 0])))
    0.5
    """
    _check_classification(scores, labels, "scores")
    scores = jnp.asarray(scores)
    return jnp.mean(jnp.argmax(scores, axis=-1) == jnp.asarray(labels), dtype=scores.dtype)


def categorical_nll(
    log_probabilities: Float[Array, "N C"], labels: Int[Array, " N"]
) -> Float[Array, ""]:
    """The mean negative log probability of the labels.

    **Arguments:**

    - `log_probabilities`: shape `(N, C)`.
    - `labels`: integers from 0 to C - 1, shape `(N,)`.

    **Returns:** shape `()`, in nats.

    **Raises:** `ValueError` for other shapes, or labels that are no integers.

    >>> import jax.numpy as jnp
    >>> log_probabilities = jnp.log(jnp.array([[0.5, 0.5], [0.25, 0.75]]))
    >>> round(float(categorical_nll(log_probabilities, jnp.array([0, 0]))), 4)
    1.0397
    """
    _check_classification(log_probabilities, labels, "log_probabilities")
    picked = jnp.take_along_axis(
        jnp.asarray(log_probabilities), jnp.asarray(labels)[:, None], axis=-1
    )
    return -jnp.mean(picked)


class CalibrationBins(NamedTuple):
    """Predictions grouped by confidence, as a reliability diagram shows them.

    - `edges`: of the M bins of equal width; bin m holds confidences in `(edges[m], edges[m + 1]]`,
      the first one 0 as well.
    - `count`: examples in each bin.
    - `confidence`, `accuracy`: mean over each bin; NaN where it is empty.
    """

    edges: Float[Array, " M_plus_1"]
    count: Int[Array, " M"]
    confidence: Float[Array, " M"]
    accuracy: Float[Array, " M"]


def _bin_sums(
    probabilities: Float[Array, "N C"], labels: Int[Array, " N"], num_bins: int
) -> tuple[Array, Array, Array, Array]:
    _check_classification(probabilities, labels, "probabilities")
    num_bins = whole_number(num_bins, "num_bins")
    probabilities, labels = jnp.asarray(probabilities), jnp.asarray(labels)
    dtype = probabilities.dtype
    confidence = jnp.max(probabilities, axis=-1)
    is_right = (jnp.argmax(probabilities, axis=-1) == labels).astype(dtype)
    edges = jnp.linspace(0, 1, num_bins + 1, dtype=dtype)
    index = jnp.searchsorted(edges[1:-1], confidence, side="left")

    def total(values: Shaped[Array, " N"]) -> Shaped[Array, " M"]:
        return jnp.zeros(num_bins, values.dtype).at[index].add(values)

    return edges, total(jnp.ones_like(labels)), total(confidence), total(is_right)


def calibration_bins(
    probabilities: Float[Array, "N C"], labels: Int[Array, " N"], num_bins: int = 15
) -> CalibrationBins:
    """Groups examples by the probability of their predicted class, for a reliability diagram.

    DeGroot & Fienberg (1983), "The Comparison and Evaluation of Forecasters".

    **Arguments:**

    - `probabilities`: shape `(N, C)`.
    - `labels`: integers from 0 to C - 1, shape `(N,)`.
    - `num_bins`: M.

    **Returns:** a `CalibrationBins`.

    **Raises:** `ValueError` for other shapes, labels that are no integers, or an M that is not a
    positive integer.

    >>> import jax.numpy as jnp
    >>> probabilities = jnp.array([[0.9, 0.1], [0.2, 0.8], [0.6, 0.4]])
    >>> bins = calibration_bins(probabilities, jnp.array([0, 1, 1]), num_bins=2)
    >>> bins.count.tolist(), round(float(bins.accuracy[1]), 2)
    ([0, 3], 0.67)
    """
    edges, count, confidence, right = _bin_sums(probabilities, labels, num_bins)
    size = count.astype(confidence.dtype)
    # Empty bins are 0 / 0 = NaN; dividing by NaN instead says so without a numerical warning.
    size = jnp.where(size > 0, size, jnp.nan)
    return CalibrationBins(edges, count, confidence / size, right / size)


def expected_calibration_error(
    probabilities: Float[Array, "N C"], labels: Int[Array, " N"], num_bins: int = 15
) -> Float[Array, ""]:
    """The mean gap between confidence and accuracy: `sum_m n_m / N |accuracy_m - confidence_m|`.

    Guo, Pleiss, Sun & Weinberger (2017), "On Calibration of Modern Neural Networks", equation 3.

    Arguments and errors are those of `calibration_bins`.

    **Returns:** shape `()`, between 0 and 1.

    >>> import jax.numpy as jnp
    >>> probabilities = jnp.array([[0.75, 0.25]] * 4)
    >>> float(expected_calibration_error(probabilities, jnp.array([0, 0, 0, 1])))
    0.0
    """
    _, count, confidence, right = _bin_sums(probabilities, labels, num_bins)
    return jnp.sum(jnp.abs(right - confidence)) / jnp.sum(count).astype(confidence.dtype)
