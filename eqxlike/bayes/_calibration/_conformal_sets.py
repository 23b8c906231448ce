"""Split conformal prediction of classes. `N` is the number of examples, `C` that of classes."""

from typing import Literal

import jax.numpy as jnp
import jax.random as jr
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from ..._module import Module, field
from .._mixtures import CategoricalMixture, check_mixture
from ._checks import check_finite, check_labels
from ._quantile import conformal_quantile

SetScore = Literal["probability", "adaptive"]


class ConformalSets(Module):
    """Sets of classes that hold the label with a given probability, as `conformal_sets` fits them.

    - `quantile`: the quantile of the calibration scores, shape `()`.
    - `level`: the probability, between 0 and 1.
    - `score`: the score.
    - `is_randomised`: whether a call takes a key.
    """

    quantile: Float[Array, ""]
    level: float = field(static=True)
    score: SetScore = field(static=True)
    is_randomised: bool = field(static=True)

    def __call__(
        self, prediction: CategoricalMixture, *, key: PRNGKeyArray | None = None
    ) -> Bool[Array, "*B C"]:
        """Which classes are in the set of each example.

        **Arguments:**

        - `prediction`: of the same model as those it was calibrated on.
        - `key`: another one than that of the calibration, where that had one; else none.

        **Returns:** shape `(*B, C)`.

        **Raises:** `ValueError` if the key is missing, or one too many.
        """
        check_mixture(prediction, CategoricalMixture, "ConformalSets")
        if self.is_randomised != (key is not None):
            wanted, came = ("a key", "none") if self.is_randomised else ("no key", "one")
            raise ValueError(
                f"ConformalSets expects {wanted}, as at its calibration, got {came}: the sets of "
                "both are randomised, or neither."
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
    """Sets that hold the next label with probability `level`, be the model right or wrong.

    Split conformal prediction. The probability is over the calibration examples and the next one,
    if they are exchangeable; it is at least `level`, and but for ties at most
    `level + 1 / (N + 1)`.

    **Arguments:**

    - `prediction`: of the classes `labels`, by a model that was not trained on them.
    - `labels`: calibration examples, integers from 0 to C - 1, shape `(N,)`.
    - `level`: between 0 and 1.
    - `score`: `"probability"`, 1 less the probability of the class, whose sets are the smallest on
      average and may be empty (Sadinle, Lei and Wasserman, 2019, "Least Ambiguous Set-Valued
      Classifiers With Bounded Error Levels"); or `"adaptive"`, the probability of all classes that
      are more probable, whose sets are larger where classes are harder to tell, and never empty
      (Romano, Sesia and Candès, 2020, "Classification with Valid and Adaptive Coverage").
    - `key`: for adaptive sets that leave their last class out by chance. Without it the labels that
      are predicted tie, so that sets cover more than they must where most are; with it a set may be
      empty.

    **Returns:** a `ConformalSets`, to be called on the predictions of other examples.

    **Raises:** `TypeError` if `prediction` is no mixture; `ValueError` for other shapes or words,
    labels that are no classes, a level outside, fewer examples than `level / (1 - level)`,
    probabilities that are not finite, or a key where nothing is random. Under `jit` values are not
    looked at.

    >>> import jax.numpy as jnp
    >>> calibration = CategoricalMixture(jnp.log(jnp.array([9 * [[0.6, 0.3, 0.1]]])))
    >>> sets = conformal_sets(calibration, jnp.array([0, 0, 0, 0, 0, 1, 1, 1, 2]), level=0.8)
    >>> sets(calibration)[0].tolist()
    [True, True, False]
    """
    check_mixture(prediction, CategoricalMixture, "conformal_sets")
    labels = jnp.asarray(labels)
    check_labels(labels, prediction.batch_shape, prediction.logits.shape[-1], "conformal_sets")
    probabilities = prediction.probabilities
    if score == "probability":
        if key is not None:
            raise ValueError('conformal_sets takes a key for score="adaptive" alone.')
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


def _adaptive_scores(
    probabilities: Float[Array, "*B C"], key: PRNGKeyArray | None
) -> Float[Array, "*B C"]:
    """The probability of all classes that are more probable than each; of equals, the first is.
    With a key a part of its own is added, the same part for all classes of an example.
    """
    order = jnp.argsort(-probabilities, axis=-1)
    ordered = jnp.take_along_axis(probabilities, order, axis=-1)
    before = jnp.cumsum(ordered, axis=-1) - ordered
    scores = jnp.take_along_axis(before, jnp.argsort(order, axis=-1), axis=-1)
    if key is None:
        return scores
    part = jr.uniform(key, (*probabilities.shape[:-1], 1), probabilities.dtype)
    return scores + part * probabilities
