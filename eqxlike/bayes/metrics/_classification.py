"""Measures of predictions of classes. `N` is the number of examples, `C` that of classes."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from ._checks import check_classification


def accuracy(scores: Float[Array, "N C"], labels: Int[Array, " N"]) -> Float[Array, ""]:
    """The fraction of examples whose greatest score is at the label.

    **Arguments:**

    - `scores`: logits or probabilities, shape `(N, C)`.
    - `labels`: integers from 0 to C - 1, shape `(N,)`.

    **Returns:** shape `()`, between 0 and 1.

    **Raises:** `ValueError` for other shapes, or labels that are no integers; `TypeError` for a
    prediction, which has `probabilities`.

    >>> import jax.numpy as jnp
    >>> float(accuracy(jnp.array([[0.9, 0.1], [0.2, 0.8]]), jnp.array([0, 0])))
    0.5
    """
    check_classification(scores, labels, "scores")
    scores = jnp.asarray(scores)
    return jnp.mean(jnp.argmax(scores, axis=-1) == jnp.asarray(labels), dtype=scores.dtype)


def brier(probabilities: Float[Array, "N C"], labels: Int[Array, " N"]) -> Float[Array, ""]:
    """The Brier score: the squared distance `sum_c (p_c - 1[c = y])^2` from the label.

    Brier (1950), "Verification of Forecasts Expressed in Terms of Probability".

    **Arguments:**

    - `probabilities`: shape `(N, C)`.
    - `labels`: integers from 0 to C - 1, shape `(N,)`.

    **Returns:** the mean over the examples, shape `()`, between 0 and 2; lower is better.

    **Raises:** `ValueError` for other shapes, or labels that are no integers; `TypeError` for a
    prediction, which has `probabilities`.

    >>> import jax.numpy as jnp
    >>> float(brier(jnp.array([[0.5, 0.5], [1.0, 0.0]]), jnp.array([0, 0])))
    0.25
    """
    check_classification(probabilities, labels, "probabilities")
    probabilities = jnp.asarray(probabilities)
    truth = jax.nn.one_hot(labels, probabilities.shape[1], dtype=probabilities.dtype)
    return jnp.mean(jnp.sum((probabilities - truth) ** 2, axis=-1))
