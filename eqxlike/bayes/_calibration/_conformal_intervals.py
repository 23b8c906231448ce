"""Split conformal prediction of numbers. `N` is the number of calibration examples."""

from typing import Literal

import jax.numpy as jnp
from jaxtyping import Array, Float

from ..._module import Module, field
from .._mixtures import Mixture, check_mixture
from ._checks import check_finite
from ._quantile import conformal_quantile

IntervalScore = Literal["normalised", "quantile"]


class ConformalIntervals(Module):
    """Intervals that hold what comes with a given probability, as `conformal_intervals` fits them.

    - `quantile`: the quantile of the calibration scores, shape `()`.
    - `level`: the probability, between 0 and 1.
    - `score`: the score.
    """

    quantile: Float[Array, ""]
    level: float = field(static=True)
    score: IntervalScore = field(static=True)

    def __call__(self, prediction: Mixture) -> tuple[Float[Array, "*B"], Float[Array, "*B"]]:
        """The ends of the intervals.

        **Arguments:**

        - `prediction`: of the same model as those it was calibrated on.

        **Returns:** `(lower, upper)`, in the unit of the numbers.
        """
        check_mixture(prediction, Mixture, "ConformalIntervals")
        if self.score == "normalised":
            half = self.quantile * jnp.sqrt(prediction.variance)
            return prediction.mean - half, prediction.mean + half
        lower, upper = prediction.interval(self.level)
        # Ends that passed each other meet in the middle.
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
    """Intervals that hold the next number with probability `level`, be the model right or wrong.

    Split conformal prediction (Papadopoulos, Proedrou, Vovk and Gammerman, 2002; Lei, G'Sell,
    Rinaldo, Tibshirani and Wasserman, 2018, "Distribution-Free Predictive Inference for
    Regression"). The probability is over the calibration examples and the next one, if they are
    exchangeable; it lies between `level` and `level + 1 / (N + 1)`, and does not hold for each x
    by itself.

    **Arguments:**

    - `prediction`: of the numbers `y`, by a model that was not trained on them.
    - `y`: calibration examples, shape `(N,)`.
    - `level`: between 0 and 1.
    - `score`: how far a number is from its prediction: `"normalised"`, which is
      `|y - mean| / sqrt(variance)`; or `"quantile"`, how far it is outside the central interval of
      probability `level`, negative inside, which also serves a prediction that is skewed or has no
      variance (Romano, Patterson and Candès, 2019, "Conformalized Quantile Regression").

    **Returns:** a `ConformalIntervals`, to be called on the predictions of other examples.

    **Raises:** `TypeError` if `prediction` is no mixture; `ValueError` for other shapes or words, a
    level outside, fewer examples than `level / (1 - level)`, or a score that is not
    finite. Under `jit` scores are not looked at.

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
            "conformal_intervals expects y of shape (N,) and a prediction of as many numbers, got "
            f"{y.shape} and {prediction.batch_shape}."
        )
    hint = ""
    if score == "normalised":
        scores = jnp.abs(y - prediction.mean) / jnp.sqrt(prediction.variance)
        hint = '; score="quantile" asks for no mean and no variance'
    elif score == "quantile":
        lower, upper = prediction.interval(level)
        scores = jnp.maximum(lower - y, y - upper)
    else:
        raise ValueError(f'score must be "normalised" or "quantile", got {score!r}.')
    quantile = conformal_quantile(scores, level, "conformal_intervals")
    check_finite(scores, "conformal_intervals: scores", hint)
    return ConformalIntervals(quantile, float(level), score)
