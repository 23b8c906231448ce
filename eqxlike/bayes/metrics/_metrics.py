"""Metrics: proper scores of any prediction, and metrics of numbers, classes and calibration."""

import functools
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PRNGKeyArray, Shaped

from ..._check_numbers import whole_number
from .._libraries import as_libraries_compute, is_normal
from .._mixtures import Mixture, as_classes, as_floating, check_classes

# --- The negative log predictive density, for any prediction ---


def nll(prediction: Any, y: Array) -> Float[Array, ""]:
    """The negative log predictive density: the mean of `-log p(y)` over the examples.

    **Arguments:**

    - `prediction`: a `bayes.Mixture`, a `bayes.CategoricalMixture`, a NumPyro distribution, or any
      object with a method `log_prob`.
    - `y`: the targets, one for each distribution.

    **Returns:** shape `()`, in nats; lower is better. For numeric targets, the density is per unit
    of `y`.

    **Raises:** `TypeError` if `prediction` has no `log_prob`. `ValueError` if the shapes differ;
    shapes are not broadcast.

    >>> import jax, jax.numpy as jnp
    >>> from eqxlike import bayes
    >>> mixture = bayes.CategoricalMixture(jnp.zeros((3, 2, 4)))
    >>> round(float(jax.jit(nll)(mixture, jnp.array([0, 1]))), 4)
    1.3863
    """
    if not _has_log_prob(prediction):
        raise TypeError(
            "nll expects a prediction with a method `log_prob`, such as a `bayes.Mixture`; got "
            f"{type(prediction).__name__}. Write `nll(prediction, y)`."
        )
    y = as_classes(y)
    with as_libraries_compute():
        log_density = prediction.log_prob(y)
    event_axes = len(getattr(prediction, "event_shape", ()))
    shape = jnp.shape(y)[: jnp.ndim(y) - event_axes]
    if log_density.shape != shape:
        raise ValueError(
            f"nll expects one target for each distribution, got y of shape {jnp.shape(y)} and "
            f"log densities of shape {log_density.shape}."
        )
    return -jnp.mean(log_density)


# --- The continuous ranked probability score, for `N` examples and `S` draws ---


def crps(
    y: Float[Array, "*N"],
    prediction: Mixture | Float[Array, "S *N"],
    *,
    key: PRNGKeyArray | None = None,
    num_draws: int = 1000,
) -> Float[Array, ""]:
    """The continuous ranked probability score, `E|X - y| - E|X - X'| / 2`.

    The CRPS is a proper score. For a point prediction it equals the absolute error (Gneiting and
    Raftery, 2007, "Strictly Proper Scoring Rules, Prediction, and Estimation"). For mixtures of
    normals, the CRPS is computed in closed form (Grimit, Gneiting, Berrocal and Johnson, 2006, "The
    continuous ranked probability score for circular variables and its application to mesoscale
    forecast ensemble verification"), and for other mixtures from draws.

    **Arguments:**

    - `y`: targets, shape `(*N)`.
    - `prediction`: a `bayes.Mixture` with the batch shape `(*N)`, or `S` draws from the predictive
      distributions, shape `(S, *N)`, in the unit of `y`.
    - `key`, `num_draws`: random key and number of draws, for a mixture whose components are not
      normal. `num_draws` is rounded up to a multiple of the number of components.

    **Returns:** the mean over the examples, shape `()`, in the unit of `y`; lower is better.

    **Raises:** `TypeError` if `y` is a mixture. `ValueError` if shapes are incompatible,
    `num_draws` is not a positive integer, or draws are needed and `key` is missing.

    >>> import jax, jax.numpy as jnp, numpyro.distributions as dist
    >>> from eqxlike import bayes
    >>> float(crps(jnp.array([1.0]), jnp.array([[3.0]])))
    2.0
    >>> mixture = bayes.Mixture(dist.Normal(jnp.array([[-1.0], [1.0]]), 0.5))
    >>> round(float(jax.jit(crps)(jnp.array([1.0]), mixture)), 4)
    0.5582
    """
    check_array(y, "y", "crps(y, prediction)")
    y = jnp.asarray(y)
    if isinstance(prediction, Mixture):
        components = prediction.components
        if prediction.batch_shape != y.shape:
            raise ValueError(
                f"crps expects a mixture with the shape of y as batch shape, got y of shape "
                f"{y.shape} and batch shape {prediction.batch_shape}."
            )
        if is_normal(components):
            moments = prediction._moment("mean"), prediction._moment("variance")
            return jnp.mean(_of_normals(y, *moments))
        draws = _draws(components, key, num_draws)
    elif _has_log_prob(prediction):
        raise TypeError(
            "crps expects a bayes.Mixture or draws, got a "
            f"{type(prediction).__name__}. For classes use `brier(prediction.probabilities, y)`."
        )
    else:
        draws = jnp.asarray(prediction)
    if draws.ndim != y.ndim + 1 or draws.shape[1:] != y.shape:
        raise ValueError(
            f"crps expects draws of shape (S, *N) for y of shape (*N), got {draws.shape} and "
            f"{y.shape}."
        )
    size = draws.shape[0]
    with as_libraries_compute():
        dtype = jnp.result_type(y, draws, float)  # draws of counts are integers
    y, draws = y.astype(dtype), draws.astype(dtype)
    # The sum of |x_i - x_j| over all pairs, from the sorted draws.
    weights = (2 * jnp.arange(size) - size + 1).astype(dtype)
    spread = jnp.tensordot(weights, jnp.sort(draws, axis=0), axes=1) / size**2
    return jnp.mean(jnp.mean(jnp.abs(draws - y[None]), axis=0) - spread)


# Jitted, so that a call outside jit does not compile the loop again.
@jax.jit
def _of_normals(
    y: Float[Array, "*N"], mean: Float[Array, "S *N"], variance: Float[Array, "S *N"]
) -> Float[Array, "*N"]:
    def absolute(mean: Array, variance: Array) -> Array:
        """`E|Z|` of a normal Z."""
        # Use erf instead of the normal CDF: 1000 components of 500 numbers take 1.7 s instead of
        # 3.7 s. Avoid division by 0, because the variance of a narrow component may round to 0.
        z = mean / jnp.sqrt(jnp.maximum(2 * variance, jnp.finfo(variance.dtype).tiny))
        density = jnp.sqrt(2 * variance / jnp.pi) * jnp.exp(-(z**2))
        return mean * jax.lax.erf(z) + density

    # Compare one component at a time with all others, which needs memory for S N numbers instead of
    # S^2 N.
    def to_others(one: tuple[Array, Array]) -> Array:
        return jnp.mean(absolute(mean - one[0][None], variance + one[1][None]), axis=0)

    spread = jnp.mean(jax.lax.map(to_others, (mean, variance)), axis=0)
    return jnp.mean(absolute(mean - y[None], variance), axis=0) - spread / 2


def _draws(components: Any, key: PRNGKeyArray | None, num_draws: int) -> Float[Array, "S *N"]:
    num_draws = whole_number(num_draws, "num_draws")
    if key is None:
        raise ValueError(
            f"crps of a mixture of {type(components).__name__} is computed from draws: pass "
            "`key=`. Only mixtures of normals have a closed form."
        )
    num_components, *shape = components.batch_shape
    each = -(-num_draws // num_components)
    with as_libraries_compute():
        draws = components.sample(key, (each,))
    return draws.reshape(each * num_components, *shape)


# --- Metrics of numeric predictions, for `N` examples ---


def rmse(prediction: Float[Array, "*N"], y: Float[Array, "*N"]) -> Float[Array, ""]:
    """The root mean squared error, `sqrt(mean((prediction - y)^2))`.

    **Arguments:**

    - `prediction`, `y`: arrays of the same shape and unit.

    **Returns:** shape `()`, in the unit of `y`.

    **Raises:** `ValueError` if the shapes differ. `TypeError` for a mixture instead of an array.

    >>> import jax.numpy as jnp
    >>> float(rmse(jnp.array([1.0, 2.0]), jnp.array([3.0, 4.0])))
    2.0
    """
    return _rmse(*_of_one_shape("rmse(prediction.mean, y)", prediction=prediction, y=y))


# Jitted, because outside jit each operation would be compiled separately.
@jax.jit
def _rmse(prediction: Float[Array, "*N"], y: Float[Array, "*N"]) -> Float[Array, ""]:
    return jnp.sqrt(jnp.mean((y - prediction) ** 2))


def coverage(
    y: Float[Array, "*N"], lower: Float[Array, "*N"], upper: Float[Array, "*N"]
) -> Float[Array, ""]:
    """The fraction of `y` within `[lower, upper]`.

    **Arguments:**

    - `y`, `lower`, `upper`: arrays of the same shape and unit.

    **Returns:** shape `()`, between 0 and 1.

    **Raises:** `ValueError` if the shapes differ. `TypeError` for a mixture instead of an array.

    >>> import jax.numpy as jnp
    >>> y = jnp.array([1.0, 2.0, 3.0, 4.0])
    >>> float(coverage(y, jnp.zeros(4), jnp.full(4, 3.0)))
    0.75
    """
    call = "coverage(y, *prediction.interval(0.9))"
    return _coverage(*_of_one_shape(call, y=y, lower=lower, upper=upper))


@jax.jit
def _coverage(
    y: Float[Array, "*N"], lower: Float[Array, "*N"], upper: Float[Array, "*N"]
) -> Float[Array, ""]:
    return jnp.mean((lower <= y) & (y <= upper), dtype=y.dtype)


def sharpness(lower: Float[Array, "*N"], upper: Float[Array, "*N"]) -> Float[Array, ""]:
    """The mean width of the intervals `[lower, upper]`.

    Among calibrated intervals, narrower intervals are better.

    **Arguments:**

    - `lower`, `upper`: arrays of the same shape and unit.

    **Returns:** shape `()`, in the same unit.

    **Raises:** `ValueError` if the shapes differ. `TypeError` for a mixture instead of an array.

    >>> import jax.numpy as jnp
    >>> float(sharpness(jnp.zeros(2), jnp.array([1.0, 3.0])))
    2.0
    """
    call = "sharpness(*prediction.interval(0.9))"
    lower, upper = _of_one_shape(call, lower=lower, upper=upper)
    return jnp.mean(upper - lower)


# --- Checks of arguments ---


def _of_one_shape(call: str, /, **values: Array) -> list[Array]:
    """Checks that values are arrays of the same shape. Converts integers to floats, because
    integers may overflow.

    **Arguments:**

    - `call`: a correct call, for the error message.
    """
    for name, value in values.items():
        check_array(value, name, call)
    arrays = {name: as_floating(value) for name, value in values.items()}
    if len({array.shape for array in arrays.values()}) != 1:
        listed = ", ".join(f"{name} {array.shape}" for name, array in arrays.items())
        raise ValueError(f"Expected arrays of the same shape, got {listed}.")
    return list(arrays.values())


def check_array(value: Any, name: str, call: str) -> None:
    """Raises `TypeError` if `value` is a distribution instead of an array.

    The message shows `call`, the correct call.
    """
    if _has_log_prob(value):
        raise TypeError(
            f"Expected an array as {name}, got a {type(value).__name__}: write `{call}`."
        )


def _has_log_prob(value: Any) -> bool:
    return callable(getattr(value, "log_prob", None))


# --- Metrics of class predictions ---
#
# `C` is the number of classes, `M` the number of bins. With labels of shape `(*N)`, such as `(B,
# T)` for the tokens of texts, each label counts as an example.


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
