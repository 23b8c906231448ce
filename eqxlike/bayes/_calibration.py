"""Calibration: temperature scaling, conformal intervals and sets.

`N` is the number of examples, `C` the number of classes.
"""

import math
import warnings
from fractions import Fraction
from typing import Literal, overload

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from .. import Module, field
from .._check_numbers import real_number
from .._compat import Tracer
from ._mixtures import (
    CategoricalMixture,
    Mixture,
    as_classes,
    as_floating,
    check_classes,
    check_mixture,
)

_LEAST, _MOST = 0.01, 100.0


class TemperatureScaling(Module):
    """Divides logits by a temperature. A temperature above 1 makes predictions less certain.

    The predicted class does not change. A call on logits returns logits. A call on a
    `CategoricalMixture` first averages the probabilities of the networks, and then scales the
    average (Rahaman and Thiery, 2021, "Uncertainty Quantification and Deep Ensembles"). The result
    is a mixture with one component, so it has no epistemic uncertainty. Read the epistemic
    uncertainty from the original mixture.

    - `temperature`: shape `()`, positive.
    """

    temperature: Float[Array, ""]

    @overload
    def __call__(self, prediction: CategoricalMixture) -> CategoricalMixture: ...
    @overload
    def __call__(self, prediction: Float[Array, "*B C"]) -> Float[Array, "*B C"]: ...
    def __call__(
        self, prediction: CategoricalMixture | Float[Array, "*B C"]
    ) -> CategoricalMixture | Float[Array, "*B C"]:
        """The scaled prediction.

        **Arguments:**

        - `prediction`: logits of shape `(*B, C)`, or a mixture over them.
        """
        logits = _logits(prediction)
        scaled = logits / self.temperature.astype(logits.dtype)
        if isinstance(prediction, CategoricalMixture):
            return CategoricalMixture(scaled[None])
        return scaled


def temperature_scaling(
    prediction: CategoricalMixture | Float[Array, "N *T C"], labels: Int[Array, "N *T"]
) -> TemperatureScaling:
    """Finds the temperature that minimises the NLL of held-out examples.

    Guo, Pleiss, Sun and Weinberger (2017), "On Calibration of Modern Neural Networks". The NLL is
    convex in the inverse temperature. Bisection finds the zero of the derivative, to the precision
    of the logits' dtype.

    The temperature lies between 0.01 and 100. If the predicted class is right for all examples, a
    lower temperature always has a lower NLL, so the result is 0.01. If the logits are worse than
    uniform guesses, a higher temperature always has a lower NLL, so the result is 100. Both cases
    give a warning.

    **Arguments:**

    - `prediction`: logits of shape `(N, *T, C)`, or a mixture with that shape, for examples that
      the model was not trained on. `*T` may be an axis of tokens.
    - `labels`: integers from 0 to C - 1, or booleans, shape `(N, *T)`.

    **Returns:** a `TemperatureScaling`. Call it on the predictions of other examples.

    **Raises:** `ValueError` if the shape of an argument is wrong, if there are no examples, if a
    label is not a class, or if a logit is not finite. Under `jit`, values are not checked and there
    are no warnings.

    >>> import jax, jax.numpy as jnp
    >>> logits = jnp.array([[8.0, 0.0], [8.0, 0.0], [8.0, 0.0], [8.0, 0.0]])
    >>> scaling = temperature_scaling(logits, jnp.array([0, 0, 0, 1]))
    >>> [round(each, 3) for each in jax.nn.softmax(scaling(logits[0])).tolist()]
    [0.75, 0.25]
    """
    logits, labels = _logits(prediction), as_classes(labels)
    if logits.ndim == 0:
        raise ValueError("temperature_scaling expects logits of shape (N, C), got shape ().")
    if logits.ndim > 2 and labels.shape == logits.shape[:-1]:
        logits, labels = logits.reshape(-1, logits.shape[-1]), labels.reshape(-1)
    check_labels(labels, logits.shape[:-1], logits.shape[-1], "temperature_scaling")
    check_finite(logits, "temperature_scaling: logits", "")
    temperature = _best_temperature(logits, labels)
    if not isinstance(temperature, Tracer):
        _warn_of_bounds(float(temperature), len(labels))
    return TemperatureScaling(temperature)


def _logits(prediction: CategoricalMixture | Float[Array, "*B C"]) -> Float[Array, "*B C"]:
    if isinstance(prediction, CategoricalMixture):
        return prediction.log_probabilities
    if isinstance(prediction, Mixture):
        check_mixture(prediction, CategoricalMixture, "temperature_scaling")
    return as_floating(prediction)


# Jitted, so that a call outside jit does not compile the loop again.
@jax.jit
def _best_temperature(logits: Float[Array, "N C"], labels: Int[Array, " N"]) -> Float[Array, ""]:
    # A margin is the logit of a class minus the logit of the label. The derivative of the NLL with
    # respect to the inverse temperature is the mean expected margin, which increases with the
    # inverse temperature.
    margins = logits - jnp.take_along_axis(logits, labels[:, None], axis=-1)

    def is_too_cold(log_temperature: Array) -> Array:
        probabilities = jax.nn.softmax(margins / jnp.exp(log_temperature), axis=-1)
        return jnp.mean(jnp.sum(probabilities * margins, axis=-1)) > 0

    def halve(_: int, bounds: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = bounds
        middle = (low + high) / 2
        is_low = is_too_cold(middle)
        return jnp.where(is_low, middle, low), jnp.where(is_low, high, middle)

    dtype = logits.dtype
    bounds = jnp.log(jnp.asarray(_LEAST, dtype)), jnp.log(jnp.asarray(_MOST, dtype))
    num_halvings = jnp.finfo(dtype).nmant + 4
    low, high = jax.lax.fori_loop(0, num_halvings, halve, bounds)
    return jnp.exp((low + high) / 2)


def _warn_of_bounds(temperature: float, num_examples: int) -> None:
    if math.isclose(temperature, _LEAST, rel_tol=1e-4):
        warnings.warn(
            f"temperature_scaling: the temperature reached its lower limit, {_LEAST}: the "
            f"predicted class is right for all of the {num_examples} examples, so the NLL "
            "decreases towards temperature 0. Use more examples, or do not scale the predictions.",
            stacklevel=3,
        )
    elif math.isclose(temperature, _MOST, rel_tol=1e-4):
        warnings.warn(
            f"temperature_scaling: the temperature reached its upper limit, {_MOST:g}: the logits "
            f"of the {num_examples} examples do not predict the labels. Check that labels and "
            "predictions belong to the same examples.",
            stacklevel=3,
        )


# --- Split conformal prediction of numbers. `N` is the number of calibration examples ---


IntervalScore = Literal["normalised", "quantile"]


class ConformalIntervals(Module):
    """Prediction intervals with a given coverage probability, fitted by `conformal_intervals`.

    - `quantile`: the quantile of the calibration scores, shape `()`.
    - `level`: the coverage probability, between 0 and 1.
    - `score`: the argument `score` of `conformal_intervals`.
    """

    quantile: Float[Array, ""]
    level: float = field(static=True)
    score: IntervalScore = field(static=True)

    def __call__(self, prediction: Mixture) -> tuple[Float[Array, "*B"], Float[Array, "*B"]]:
        """The ends of the intervals.

        **Arguments:**

        - `prediction`: a prediction of the model that was calibrated.

        **Returns:** `(lower, upper)`, in the unit of the targets.
        """
        check_mixture(prediction, Mixture, "ConformalIntervals")
        if self.score == "normalised":
            half = self.quantile * jnp.sqrt(prediction.variance)
            return prediction.mean - half, prediction.mean + half
        lower, upper = prediction.interval(self.level)
        # A negative quantile may move the lower end above the upper end. Both ends are then the
        # midpoint.
        middle = (lower + upper) / 2
        return (
            jnp.minimum(lower - self.quantile, middle),
            jnp.maximum(upper + self.quantile, middle),
        )


def conformal_intervals(
    prediction: Mixture,
    y: Float[Array, " N"],
    *,
    level: float = 0.9,
    score: IntervalScore = "normalised",
) -> ConformalIntervals:
    """Fits intervals that contain the next target with probability `level`, for any model.

    The method is split conformal prediction (Papadopoulos, Proedrou, Vovk and Gammerman, 2002; Lei,
    G'Sell, Rinaldo, Tibshirani and Wasserman, 2018, "Distribution-Free Predictive Inference for
    Regression"). The guarantee requires exchangeable examples. The probability is taken over the
    calibration examples and the next example, and lies between `level` and `level + 1 / (N + 1)`.
    The guarantee does not hold separately for each x.

    **Arguments:**

    - `prediction`: predictions of `y` by a model that was not trained on these examples.
    - `y`: targets of the calibration examples, shape `(N,)`.
    - `level`: coverage probability, between 0 and 1.
    - `score`: distance between a target and its prediction. `"normalised"` is `|y - mean| /
      sqrt(variance)`. `"quantile"` is the distance from the target to the nearest end of the
      central interval of probability `level`. This score is negative if the target lies inside the
      interval. `"quantile"` also suits predictions that are skewed or have no variance (Romano,
      Patterson and Candès, 2019, "Conformalized Quantile Regression").

    **Returns:** a `ConformalIntervals`. Call it on the predictions of other examples.

    **Raises:** `TypeError` if `prediction` is not a mixture. `ValueError` for an argument of a
    wrong shape or value, such as a `level` outside (0, 1). `ValueError` if there are fewer than
    `level / (1 - level)` examples, or if a score is not finite. Under `jit`, scores are not
    checked.

    >>> import jax.numpy as jnp, numpyro.distributions as dist
    >>> overconfident = lambda x: Mixture(dist.Normal(x[None], 0.1))
    >>> x = jnp.arange(9.0)
    >>> intervals = conformal_intervals(overconfident(x), x + 1, level=0.9)
    >>> lower, upper = intervals(overconfident(jnp.array([20.0])))
    >>> lower.tolist(), upper.tolist()
    ([19.0], [21.0])
    """
    check_mixture(prediction, Mixture, "conformal_intervals")
    y = jnp.asarray(y)
    if y.ndim != 1 or y.shape != prediction.batch_shape:
        raise ValueError(
            "conformal_intervals expects y and prediction of the same shape (N,), got "
            f"{y.shape} and {prediction.batch_shape}."
        )
    hint = ""
    if score == "normalised":
        scores = jnp.abs(y - prediction.mean) / jnp.sqrt(prediction.variance)
        hint = '; score="quantile" needs no mean and no variance'
    elif score == "quantile":
        lower, upper = prediction.interval(level)
        scores = jnp.maximum(lower - y, y - upper)
    else:
        raise ValueError(f'score must be "normalised" or "quantile", got {score!r}.')
    quantile = conformal_quantile(scores, level, "conformal_intervals")
    check_finite(scores, "conformal_intervals: scores", hint)
    return ConformalIntervals(quantile, float(level), score)


# --- Split conformal prediction of classes ---


SetScore = Literal["probability", "adaptive"]


class ConformalSets(Module):
    """Sets of classes with a given coverage probability, fitted by `conformal_sets`.

    - `quantile`: the quantile of the calibration scores, shape `()`.
    - `level`: the coverage probability, between 0 and 1.
    - `score`: the argument `score` of `conformal_sets`.
    - `is_randomised`: whether calls require a key.
    """

    quantile: Float[Array, ""]
    level: float = field(static=True)
    score: SetScore = field(static=True)
    is_randomised: bool = field(static=True)

    def __call__(
        self, prediction: CategoricalMixture, *, key: PRNGKeyArray | None = None
    ) -> Bool[Array, "*B C"]:
        """The set of classes of each example.

        **Arguments:**

        - `prediction`: a prediction of the model that was calibrated.
        - `key`: random key. Required if `conformal_sets` was called with a key, and not allowed
          otherwise. Do not pass the same key as to `conformal_sets`.

        **Returns:** booleans of shape `(*B, C)`, true for the classes in the set.

        **Raises:** `ValueError` if a required key is missing, or a key is not expected.
        """
        check_mixture(prediction, CategoricalMixture, "ConformalSets")
        if self.is_randomised != (key is not None):
            wanted, came = ("a key", "none") if self.is_randomised else ("no key", "one")
            raise ValueError(
                f"ConformalSets expects {wanted}, got {came}: pass a key here if, and only if, "
                "`conformal_sets` was called with a key."
            )
        probabilities = prediction.probabilities
        if self.score == "probability":
            return 1 - probabilities <= self.quantile
        return _adaptive_scores(probabilities, key) <= self.quantile


def conformal_sets(
    prediction: CategoricalMixture,
    labels: Int[Array, " N"],
    *,
    level: float = 0.9,
    score: SetScore = "probability",
    key: PRNGKeyArray | None = None,
) -> ConformalSets:
    """Fits sets of classes that contain the next label with probability `level`, for any model.

    The method is split conformal prediction. The guarantee requires exchangeable examples. The
    probability is taken over the calibration examples and the next example. The probability is at
    least `level`. If no two scores are equal, it is at most `level + 1 / (N + 1)`.

    **Arguments:**

    - `prediction`: predictions of `labels` by a model that was not trained on these examples.
    - `labels`: labels of the calibration examples, integers from 0 to C - 1, or booleans, shape
      `(N,)`.
    - `level`: coverage probability, between 0 and 1.
    - `score`: `"probability"` is 1 minus the probability of the class. Its sets are the smallest on
      average and may be empty (Sadinle, Lei and Wasserman, 2019, "Least Ambiguous Set-Valued
      Classifiers With Bounded Error Levels"). `"adaptive"` is the total probability of all classes
      that are more probable than the class. Its sets are larger for harder examples. Without a key,
      its sets are never empty (Romano, Sesia and Candès, 2020, "Classification with Valid and
      Adaptive Coverage").
    - `key`: random key that randomises adaptive sets. A randomised set leaves out its least
      probable class at random, and may be empty. Without a key, all correctly predicted labels have
      the same score, so the sets of an accurate model contain the label with a higher probability
      than `level`.

    **Returns:** a `ConformalSets`. Call it on the predictions of other examples. A call returns
    booleans of shape `(N, C)`, which are True for the classes in the set of each example.

    **Raises:** `TypeError` if `prediction` is not a mixture. `ValueError` for an argument of a
    wrong shape or value, such as a label that is not a class. `ValueError` if there are fewer than
    `level / (1 - level)` examples, or if a key is passed with `score="probability"`. Under `jit`,
    values are not checked.

    >>> import jax.numpy as jnp
    >>> calibration = CategoricalMixture(jnp.log(jnp.array([9 * [[0.6, 0.3, 0.1]]])))
    >>> sets = conformal_sets(calibration, jnp.array([0, 0, 0, 0, 0, 1, 1, 1, 2]), level=0.8)
    >>> sets(calibration)[0].tolist()
    [True, True, False]
    """
    check_mixture(prediction, CategoricalMixture, "conformal_sets")
    labels = as_classes(labels)
    check_labels(labels, prediction.batch_shape, prediction.logits.shape[-1], "conformal_sets")
    probabilities = prediction.probabilities
    if score == "probability":
        if key is not None:
            raise ValueError('conformal_sets takes a key only with score="adaptive".')
        scores = 1 - _of_label(probabilities, labels)
    elif score == "adaptive":
        scores = _of_label(_adaptive_scores(probabilities, key), labels)
    else:
        raise ValueError(f'score must be "probability" or "adaptive", got {score!r}.')
    quantile = conformal_quantile(scores, level, "conformal_sets")
    check_finite(scores, "conformal_sets: scores", "")
    return ConformalSets(quantile, float(level), score, key is not None)


def _of_label(values: Array, labels: Int[Array, " N"]) -> Array:
    return jnp.take_along_axis(values, labels[:, None], axis=-1)[:, 0]


# Jitted, because outside jit each operation would be compiled separately.
@jax.jit
def _adaptive_scores(
    probabilities: Float[Array, "*B C"], key: PRNGKeyArray | None
) -> Float[Array, "*B C"]:
    """For each class, the total probability of the more probable classes.

    Among equally probable classes, a class with a lower index counts as more probable.

    With a key, the score of a class also includes a fraction of the class's own probability. The
    fraction is random, but the same for all classes of an example.
    """
    order = jnp.argsort(-probabilities, axis=-1)
    ordered = jnp.take_along_axis(probabilities, order, axis=-1)
    before = jnp.cumsum(ordered, axis=-1) - ordered
    scores = jnp.take_along_axis(before, jnp.argsort(order, axis=-1), axis=-1)
    if key is None:
        return scores
    part = jr.uniform(key, (*probabilities.shape[:-1], 1), probabilities.dtype)
    return scores + part * probabilities


# --- The quantile of the calibration scores ---


def conformal_quantile(scores: Float[Array, " N"], level: float, name: str) -> Float[Array, ""]:
    """The `ceil((N + 1) level)`-th smallest score.

    The score of the next exchangeable example is at most this quantile with a probability of at
    least `level`. If no two scores are equal, the probability is at most `level + 1 / (N + 1)`.

    **Raises:** `ValueError` unless `0 < level < 1`, or if N is too small for the level.
    """
    number = real_number(level, "level")
    if not 0 < number < 1:
        raise ValueError(f"level must lie in (0, 1), got {level!r}.")
    # The level as it is written. With floats, `ceil(0.55 * 20)` would be 12 instead of 11.
    exact, size = Fraction(repr(number)), len(scores)
    rank = math.ceil((size + 1) * exact)
    if rank > size:
        raise ValueError(
            f"{name} expects at least {math.ceil(exact / (1 - exact))} calibration examples for "
            f"level {level}, got {size}."
        )
    return jnp.sort(scores)[rank - 1]


# --- Checks of the calibration examples ---


def check_labels(labels: Array, batch_shape: tuple[int, ...], num_classes: int, name: str) -> None:
    """Raises `ValueError` unless labels have one axis, and each label is a class.

    The values of traced labels are not checked.
    """
    shape = jnp.shape(labels)
    if len(batch_shape) != 1 or shape != batch_shape:
        hint = ""
        if len(batch_shape) > 1 and shape == batch_shape:
            hint = " Pass one label per example. If all labels are exchangeable, flatten both."
        raise ValueError(
            f"{name} expects predictions of shape (N, C) and labels of shape (N,), got "
            f"{(*batch_shape, num_classes)} and {shape}.{hint}"
        )
    if shape == (0,):
        raise ValueError(f"{name}: there are no examples.")
    check_classes(labels, num_classes, name)


def check_finite(values: Array, name: str, hint: str) -> None:
    """Raises `ValueError` if a value is not finite. The error message ends with `hint`.

    The values of traced arrays are not checked.
    """
    if isinstance(values, Tracer):
        return
    num_bad = int(np.sum(~np.isfinite(values)))
    if num_bad:
        raise ValueError(f"{name}: {num_bad} of {values.size} are not finite{hint}.")
