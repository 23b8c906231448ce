"""Temperature scaling. `N` is the number of examples, `C` the number of classes."""

import math
import warnings
from typing import overload

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from ..._compat import Tracer
from ..._module import Module
from .._mixtures import CategoricalMixture
from ._checks import check_finite, check_labels

_LEAST, _MOST = 0.01, 100.0


class TemperatureScaling(Module):
    """Divides logits by a temperature: above 1 it makes predictions less certain, below more so.

    The predicted class stays. Call it on what `temperature_scaling` takes: logits come back as
    logits, a `CategoricalMixture` as one of a single component. What networks predict together is
    scaled, not each of them (Rahaman and Thiery, 2021, "Uncertainty Quantification and Deep
    Ensembles"), so the scaled mixture has no epistemic part: read that off the one given.

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
    prediction: CategoricalMixture | Float[Array, "N C"], labels: Int[Array, " N"]
) -> TemperatureScaling:
    """The temperature with the least NLL on held-out examples.

    Guo, Pleiss, Sun and Weinberger (2017), "On Calibration of Modern Neural Networks". The NLL is
    convex in the inverse of the temperature; its derivative is bisected until the dtype of the
    logits has no more digits.

    The temperature lies between 0.01 and 100. If the class predicted is right for all examples, the
    NLL falls without end as the temperature goes to 0; if the logits say less than nothing of the
    labels, as it goes to infinity. The bound is then the answer, and a warning says so.

    **Arguments:**

    - `prediction`: logits of shape `(N, C)`, or a mixture over as many, of examples that the model
      was not trained on.
    - `labels`: integers from 0 to C - 1, shape `(N,)`.

    **Returns:** a `TemperatureScaling`, to be called on the predictions of other examples.

    **Raises:** `ValueError` for other shapes, no example, labels that are no classes, or logits
    that are not finite. Under `jit` values are not looked at, neither for errors nor for warnings.

    >>> import jax, jax.numpy as jnp
    >>> logits = jnp.array([[8.0, 0.0], [8.0, 0.0], [8.0, 0.0], [8.0, 0.0]])
    >>> scaling = temperature_scaling(logits, jnp.array([0, 0, 0, 1]))
    >>> [round(each, 3) for each in jax.nn.softmax(scaling(logits[0])).tolist()]
    [0.75, 0.25]
    """
    logits, labels = _logits(prediction), jnp.asarray(labels)
    if logits.ndim == 0:
        raise ValueError("temperature_scaling expects logits of shape (N, C), got shape ().")
    check_labels(labels, logits.shape[:-1], logits.shape[-1], "temperature_scaling")
    check_finite(logits, "temperature_scaling: logits", "")
    temperature = _best_temperature(logits, labels)
    if not isinstance(temperature, Tracer):
        _warn_of_bounds(float(temperature), len(labels))
    return TemperatureScaling(temperature)


def _logits(prediction: CategoricalMixture | Float[Array, "*B C"]) -> Float[Array, "*B C"]:
    if isinstance(prediction, CategoricalMixture):
        return prediction.log_probabilities
    logits = jnp.asarray(prediction)
    return logits if jnp.issubdtype(logits.dtype, jnp.floating) else logits.astype(float)


# Jitted, so that a call outside jit does not compile the loop anew.
@jax.jit
def _best_temperature(logits: Float[Array, "N C"], labels: Int[Array, " N"]) -> Float[Array, ""]:
    # Each relative to that of the label: the mean of what is expected of them is the derivative of
    # the NLL by the inverse temperature, and grows with it.
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
            f"temperature_scaling: the NLL of {num_examples} examples falls until the temperature "
            f"is 0, and it was held at {_LEAST}: it is so where the predicted class is right for "
            "all of them. Take more examples, or leave the predictions as they are.",
            stacklevel=3,
        )
    elif math.isclose(temperature, _MOST, rel_tol=1e-4):
        warnings.warn(
            f"temperature_scaling: the NLL of {num_examples} examples falls until the temperature "
            f"is infinite, and it was held at {_MOST:g}: the logits say nothing of the labels. Do "
            "labels and predictions belong to the same examples?",
            stacklevel=3,
        )
