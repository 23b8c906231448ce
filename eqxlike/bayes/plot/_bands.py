"""Plots of numeric predictions over an input, and helpers of all plots."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Array, Float

from ..._tables import BLUE, INK, ORANGE, new_figure, tidy
from .._mixtures import Mixture, check_mixture


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
    """Plots the predictive mean over x, with bands for central intervals.

    **Arguments:**

    - `x`: inputs, in any order, shape `(N,)`.
    - `prediction`: predictions for `x`.
    - `y`: observations at `x`, shape `(N,)`. To show observations at other inputs, plot them into
      the returned axes.
    - `levels`: probability of each band, between 0 and 1.
    - `truth`: values of the true function at `x`, shape `(N,)`.
    - `ax`: matplotlib axes; a new figure by default.
    - `legend`: whether to show a legend below the axes; or a location inside the axes, such as
      `"upper left"`.

    **Returns:** the axes.

    **Raises:** `ImportError` if matplotlib is not installed. `TypeError` if `prediction` is not a
    mixture. `ValueError` if the shape of an array is wrong, there is no level, or a level lies
    outside (0, 1).

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
        raise ValueError(f"bands expects arrays of the same shape (N,), got {listed}.")
    if not levels:
        raise ValueError("bands expects at least one level, got none.")
    axes = axes_for(ax, "plot.bands")
    order = np.argsort(np.asarray(x))
    place = np.asarray(x)[order]
    strengths = np.linspace(0.22, 0.45, len(levels)) if len(levels) > 1 else [0.3]
    for level, strength in zip(sorted(levels, reverse=True), strengths, strict=True):
        lower, upper = (np.asarray(end)[order] for end in prediction.interval(level))
        colour, label = tint(BLUE, strength), f"{100 * level:g}% interval"
        axes.fill_between(place, lower, upper, color=colour, lw=0, label=label)
    mean = np.asarray(prediction.mean)[order]
    axes.plot(place, mean, color=BLUE, linewidth=1.8, label="predictive mean")
    if truth is not None:
        line = np.asarray(truth)[order]
        axes.plot(place, line, "--", color=ORANGE, linewidth=1.8, label="truth")
    if y is not None:
        observed = np.asarray(y)[order]
        axes.plot(place, observed, "o", color=INK, markersize=3.2, label="observed")
    axes.set(xlabel="input x", ylabel="predicted y")
    tidy(axes)
    add_legend(axes, legend)
    return axes


# --- Axes and legends ---


def axes_for(ax: Any, caller: str, width: float = 6.0, height: float = 4.0) -> Any:
    """`ax`, or the axes of a new figure if `ax` is `None`. Width and height are in inches."""
    return new_figure(width, height, caller).add_subplot() if ax is None else ax


def tint(colour: str, strength: float) -> tuple[float, ...]:
    """Mixes a colour with white; `strength=1` is the pure colour."""
    parts = np.array([int(colour[place : place + 2], 16) for place in (1, 3, 5)]) / 255
    return tuple(1 - strength * (1 - parts))


def add_legend(axes: Any, legend: bool | str) -> Any:
    """Adds a legend below the axes, or at a matplotlib location; `False` adds none.

    Below the axes, a legend hides neither data nor title. A figure without a layout engine has no
    space there, so the legend is placed inside, at matplotlib's best location.

    **Returns:** the legend, or `None`.
    """
    if legend is False:
        return None
    if legend is not True or axes.figure.get_layout_engine() is None:
        place = "best" if legend is True else legend
        return axes.legend(loc=place, fontsize=8, framealpha=0.9)
    return _legend_below(axes)


def _legend_below(axes: Any) -> Any:
    """A legend below the x-axis labels, with as many columns as fit the width of the axes."""
    from matplotlib.transforms import ScaledTranslation

    labels, figure = axes.xaxis.get_tightbbox(), axes.figure
    drop = 0 if labels is None else labels.y0 - axes.bbox.y0
    below = ScaledTranslation(0, drop / figure.dpi, figure.dpi_scale_trans)
    style = {"loc": "upper center", "bbox_to_anchor": (0.5, 0), "fontsize": 8, "frameon": False}
    for columns in range(len(axes.get_legend_handles_labels()[0]), 0, -1):
        place = axes.transAxes + below
        legend = axes.legend(bbox_transform=place, ncols=columns, **style)
        if legend.get_window_extent().width <= axes.bbox.width:
            break
    return axes.get_legend()


# --- Quantiles of the binomial distribution ---


def binomial_band(
    probability: float, num_trials: int, chances: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Central intervals of binomial distributions.

    **Arguments:**

    - `probability`: probability of the interval, between 0 and 1.
    - `num_trials`: number of trials.
    - `chances`: success probabilities of a trial, between 0 and 1, shape `(K,)`.

    **Returns:** the lower and upper ends, each of shape `(K,)`.
    """
    counts = np.arange(num_trials + 1)
    log_factorials = np.concatenate([[0], np.cumsum(np.log(np.arange(1, num_trials + 1)))])
    ways = log_factorials[-1] - log_factorials - log_factorials[::-1]
    # Logs of 0 are kept finite, so that 0 times the log is 0.
    log_chances = np.log(np.maximum(chances, 1e-300))[:, None]
    log_others = np.log(np.maximum(1 - chances, 1e-300))[:, None]
    masses = np.exp(ways + counts * log_chances + counts[::-1] * log_others)
    below = np.cumsum(masses, axis=1)
    tails = (1 - probability) / 2, (1 + probability) / 2
    lower, upper = (np.sum(below < tail, axis=1) for tail in tails)
    return lower, upper
