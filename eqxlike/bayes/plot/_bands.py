"""Predictions of numbers over an input."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Array, Float

from ..._figures import BLUE, INK, ORANGE, tidy
from .._mixtures import Mixture, check_mixture
from ._axes import add_legend, axes_for, tint


def bands(
    x: Float[Array, " N"],
    prediction: Mixture,
    y: Float[Array, " N"] | None = None,
    *,
    levels: Sequence[float] = (0.5, 0.9),
    truth: Float[Array, " N"] | None = None,
    ax: Any = None,
    legend: bool | str = True,
) -> Any:
    """The predictive mean over x, within bands that hold given probabilities.

    **Arguments:**

    - `x`: inputs, in any order, shape `(N,)`.
    - `prediction`: at each of them.
    - `y`: what was observed there, shape `(N,)`. Observations at other places are drawn in the axes
      returned.
    - `levels`: the probability that each band holds at each x, between 0 and 1.
    - `truth`: the function that is to be found, at each x, shape `(N,)`.
    - `ax`: axes of matplotlib; those of a new figure if there are none.
    - `legend`: whether there is one, below the axes; or where in them, in matplotlib's words, such
      as `"upper left"`.

    **Returns:** the axes.

    **Raises:** `ImportError` if matplotlib is not installed; `TypeError` if `prediction` is no
    mixture; `ValueError` for other shapes, no
    level or one outside.

    >>> import jax.numpy as jnp, numpyro.distributions as dist
    >>> x = jnp.arange(20.0)
    >>> axes = bands(x, Mixture(dist.Normal(jnp.stack([x, 2 * x]), 0.1)), truth=1.5 * x)
    >>> [text.get_text() for text in axes.get_legend().get_texts()]
    ['90% interval', '50% interval', 'predictive mean', 'truth']
    """
    check_mixture(prediction, Mixture, "plot.bands")
    shapes = {"x": np.shape(x), "prediction": prediction.batch_shape}
    shapes |= {
        name: np.shape(each) for name, each in (("y", y), ("truth", truth)) if each is not None
    }
    if len(set(shapes.values())) != 1 or len(shapes["x"]) != 1:
        listed = ", ".join(f"{name} {shape}" for name, shape in shapes.items())
        raise ValueError(f"bands expects numbers of one shape (N,), got {listed}.")
    if not levels:
        raise ValueError("bands expects at least one level, got none.")
    axes = axes_for(ax, "plot.bands")
    order = np.argsort(np.asarray(x))
    place = np.asarray(x)[order]
    strengths = np.linspace(0.22, 0.45, len(levels)) if len(levels) > 1 else [0.3]
    for level, strength in zip(sorted(levels, reverse=True), strengths, strict=True):
        lower, upper = (np.asarray(end)[order] for end in prediction.interval(level))
        axes.fill_between(
            place,
            lower,
            upper,
            color=tint(BLUE, strength),
            lw=0,
            label=f"{100 * level:g}% interval",
        )
    mean = np.asarray(prediction.mean)[order]
    axes.plot(place, mean, color=BLUE, linewidth=1.8, label="predictive mean")
    if truth is not None:
        line = np.asarray(truth)[order]
        axes.plot(place, line, "--", color=ORANGE, linewidth=1.8, label="truth")
    if y is not None:
        observed = np.asarray(y)[order]
        axes.plot(place, observed, "o", color=INK, markersize=3.2, label="observed")
    axes.set_xlabel("input x")
    axes.set_ylabel("predicted y")
    tidy(axes)
    add_legend(axes, legend)
    return axes
