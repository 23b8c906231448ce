"""The log predictive density, the one measure for predictions of every kind."""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from .._library_rules import as_libraries_compute
from ._checks import is_distribution


def nll(prediction: Any, y: Array) -> Float[Array, ""]:
    """The negative log predictive density: the mean of `-log p(y)` over the examples.

    **Arguments:**

    - `prediction`: what has a method `log_prob`: a `bayes.Mixture` or `bayes.CategoricalMixture`,
      or a distribution of NumPyro.
    - `y`: the targets, one for each distribution.

    **Returns:** shape `()`, in nats; lower is better. For numbers it is that of a density in the
    unit of `y`.

    **Raises:** `TypeError` if `prediction` has no `log_prob`; `ValueError` if the shapes differ,
    also where they would broadcast.

    >>> import jax, jax.numpy as jnp
    >>> from eqxlike import bayes
    >>> mixture = bayes.CategoricalMixture(jnp.zeros((3, 2, 4)))
    >>> round(float(jax.jit(nll)(mixture, jnp.array([0, 1]))), 4)
    1.3863
    """
    if not is_distribution(prediction):
        raise TypeError(
            "nll expects a prediction with a method `log_prob`, such as a `bayes.Mixture`; got "
            f"{type(prediction).__name__}. Write `nll(prediction, y)`."
        )
    with as_libraries_compute():
        log_density = prediction.log_prob(y)
    event_axes = len(getattr(prediction, "event_shape", ()))
    shape = jnp.shape(y)[: jnp.ndim(y) - event_axes]
    if log_density.shape != shape:
        raise ValueError(
            f"nll expects one target for each distribution; y has shape {jnp.shape(y)}, and its "
            f"log density {log_density.shape}."
        )
    return -jnp.mean(log_density)
