"""Metrics of class predictions: accuracy, the Brier score, and calibration.

`N` is the number of examples, `C` the number of classes, `M` the number of bins. With labels of
shape `(*N)`, such as `(B, T)` for the tokens of texts, each label counts as an example.
"""

import functools
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Shaped

from ..._check_numbers import whole_number
from .._mixtures import as_classes, as_floating, check_classes
from ._scores import check_array


def accuracy(scores: Float[Array, "*N C"], labels: Int[Array, "*N"]) -> Float[Array, ""]:
    """The fraction of examples whose label has the greatest score.

    **Arguments:**

    - `scores`: logits or probabilities, shape `(*N, C)`.
    - `labels`: integers from 0 to C - 1, or booleans, shape `(*N)`.

    **Returns:** shape `()`, between 0 and 1.

    **Raises:** `ValueError` if the shapes do not match, or labels are not classes. `TypeError` if a
    mixture is passed instead of its `probabilities`.

    >>> import jax.numpy as jnp
    >>> float(accuracy(jnp.array([[0.9, 0.1], [0.2, 0.8]]), jnp.array([0, 0])))
    0.5
    """
    scores, labels = _checked(scores, labels, "scores")
    return jnp.mean(jnp.argmax(scores, axis=-1) == labels, dtype=scores.dtype)


def brier(probabilities: Float[Array, "*N C"], labels: Int[Array, "*N"]) -> Float[Array, ""]:
    """The Brier score: the squared distance `sum_c (p_c - 1[c = y])^2` from the label.

    Brier (1950), "Verification of Forecasts Expressed in Terms of Probability".

    **Arguments:**

    - `probabilities`: shape `(*N, C)`.
    - `labels`: integers from 0 to C - 1, or booleans, shape `(*N)`.

    **Returns:** the mean over the examples, shape `()`, between 0 and 2; lower is better.

    **Raises:** `ValueError` if the shapes do not match, or labels are not classes. `TypeError` if a
    mixture is passed instead of its `probabilities`.

    >>> import jax.numpy as jnp
    >>> float(brier(jnp.array([[0.5, 0.5], [1.0, 0.0]]), jnp.array([0, 0])))
    0.25
    """
    probabilities, labels = _checked(probabilities, labels, "probabilities")
    truth = jax.nn.one_hot(labels, probabilities.shape[-1], dtype=probabilities.dtype)
    return jnp.mean(jnp.sum((probabilities - truth) ** 2, axis=-1))


# --- Reliability diagrams and the calibration error ---


Equal = Literal["width", "mass"]


class CalibrationBins(NamedTuple):
    """Predictions binned by confidence, for a reliability diagram.

    - `edges`: edges of the `M` bins. Bin m contains confidences in `(edges[m], edges[m + 1]]`; the
      first bin also contains its lower edge.
    - `count`: number of examples in each bin.
    - `confidence`, `accuracy`: mean over each bin; NaN for an empty bin.
    """

    edges: Float[Array, " M_plus_1"]
    count: Int[Array, " M"]
    confidence: Float[Array, " M"]
    accuracy: Float[Array, " M"]


def calibration_bins(
    probabilities: Float[Array, "*N C"],
    labels: Int[Array, "*N"],
    num_bins: int = 15,
    *,
    equal: Equal = "width",
) -> CalibrationBins:
    """Bins examples by the probability of their predicted class, for a reliability diagram.

    DeGroot & Fienberg (1983), "The Comparison and Evaluation of Forecasters".

    **Arguments:**

    - `probabilities`: shape `(*N, C)`.
    - `labels`: integers from 0 to C - 1, or booleans, shape `(*N)`.
    - `num_bins`: the number M of bins.
    - `equal`: `"width"` for bins of equal width, `"mass"` for bins with equal numbers of examples.

    **Returns:** a `CalibrationBins`.

    **Raises:** `ValueError` if the shapes do not match, labels are not classes, `num_bins` is
    not a positive integer, or `equal` is unknown.

    >>> import jax.numpy as jnp
    >>> probabilities = jnp.array([[0.9, 0.1], [0.2, 0.8], [0.6, 0.4]])
    >>> bins = calibration_bins(probabilities, jnp.array([0, 1, 1]), num_bins=2)
    >>> bins.count.tolist(), round(float(bins.accuracy[1]), 2)
    ([0, 3], 0.67)
    """
    edges, count, confidence, right = _bin_sums(probabilities, labels, num_bins, equal)
    return CalibrationBins(edges, count, *_means_of_bins(count, confidence, right))


# This function and the functions below are jitted, because outside jit each operation would be
# compiled separately.
@jax.jit
def _means_of_bins(
    count: Int[Array, " M"], *sums: Float[Array, " M"]
) -> tuple[Float[Array, " M"], ...]:
    # The means of empty bins are NaN. Divide by NaN and not by the count 0, because 0 / 0 causes a
    # floating-point warning.
    size = jnp.where(count > 0, count.astype(sums[0].dtype), jnp.nan)
    return tuple(each / size for each in sums)


def ece(
    probabilities: Float[Array, "*N C"],
    labels: Int[Array, "*N"],
    num_bins: int = 15,
    *,
    equal: Equal = "width",
) -> Float[Array, ""]:
    """The expected calibration error: `sum_m n_m / N |accuracy_m - confidence_m|`.

    Bins of equal width follow Guo, Pleiss, Sun & Weinberger (2017), "On Calibration of Modern
    Neural Networks", equation 3. Bins of equal mass follow Nixon et al. (2019), "Measuring
    Calibration in Deep Learning".

    Arguments and errors are the same as in `calibration_bins`.

    **Returns:** shape `()`, between 0 and 1.

    >>> import jax, jax.numpy as jnp
    >>> probabilities = jnp.array([[0.75, 0.25]] * 4)
    >>> float(jax.jit(ece)(probabilities, jnp.array([0, 0, 0, 1])))
    0.0
    """
    _, count, confidence, right = _bin_sums(probabilities, labels, num_bins, equal)
    return jnp.sum(jnp.abs(right - confidence)) / jnp.sum(count).astype(confidence.dtype)


def _bin_sums(
    probabilities: Float[Array, "*N C"], labels: Int[Array, "*N"], num_bins: int, equal: Equal
) -> tuple[Array, Array, Array, Array]:
    probabilities, labels = _checked(probabilities, labels, "probabilities")
    num_bins = whole_number(num_bins, "num_bins")
    if equal not in ("width", "mass"):
        raise ValueError(f'equal must be "width" or "mass", got {equal!r}.')
    return _sums_of_bins(probabilities, labels, num_bins, equal)


@functools.partial(jax.jit, static_argnums=(2, 3))
def _sums_of_bins(
    probabilities: Float[Array, "*N C"], labels: Int[Array, "*N"], num_bins: int, equal: Equal
) -> tuple[Array, Array, Array, Array]:
    dtype = probabilities.dtype
    confidence = jnp.max(probabilities, axis=-1)
    is_right = (jnp.argmax(probabilities, axis=-1) == labels).astype(dtype)
    if equal == "width":
        edges = jnp.linspace(0, 1, num_bins + 1, dtype=dtype)
        index = jnp.searchsorted(edges[1:-1], confidence, side="left")
    else:
        size = confidence.shape[0]
        order = jnp.argsort(confidence)
        index = jnp.zeros(size, int).at[order].set(jnp.arange(size) * num_bins // max(size, 1))
        edges = jnp.quantile(confidence, jnp.linspace(0, 1, num_bins + 1, dtype=dtype))

    def total(values: Shaped[Array, " N"]) -> Shaped[Array, " M"]:
        return jnp.zeros(num_bins, values.dtype).at[index].add(values)

    return edges, total(jnp.ones_like(labels)), total(confidence), total(is_right)


def _checked(
    scores: Float[Array, "*N C"], labels: Int[Array, "*N"], name: str
) -> tuple[Float[Array, "N C"], Int[Array, " N"]]:
    """Checks scores and labels, and flattens them to one axis of examples."""
    check_array(scores, name, "prediction.probabilities")
    scores, labels = as_floating(scores), as_classes(labels)
    if scores.ndim < 2 or labels.shape != scores.shape[:-1]:
        raise ValueError(
            f"Expected {name} of shape (*N, C) and labels of shape (*N), got {scores.shape} and "
            f"{labels.shape}."
        )
    check_classes(labels, scores.shape[-1], "bayes.metrics")
    return scores.reshape(labels.size, scores.shape[-1]), labels.reshape(-1)
