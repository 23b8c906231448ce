"""Plots of predictions over an input, and of calibration: bins, intervals and ranks."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Array, Float, Int

from ..._check_numbers import whole_number
from ..._tables import BLUE, GREY, INK, ORANGE, new_figure, tidy
from .._mixtures import Mixture, check_mixture
from ..metrics import CalibrationBins, calibration_bins, ece
from ..metrics._metrics import Equal

# --- Reliability diagrams ---


_FEW = 5
"""Bins with fewer predictions are drawn fainter."""


def reliability(
    probabilities: Float[Array, "N C"],
    labels: Int[Array, " N"],
    num_bins: int = 15,
    *,
    equal: Equal = "width",
    ax: Any = None,
    legend: bool | str = True,
) -> Any:
    """Plots a reliability diagram: accuracy by confidence, with the number of examples in each bin.

    If predictions are calibrated, the points lie on the diagonal. If a point lies below the
    diagonal, its predictions are overconfident. Each point has a 90% interval of its accuracy
    (Wilson, 1927, "Probable Inference, the Law of Succession, and Statistical Inference").

    **Arguments:**

    - `probabilities`, `labels`, `num_bins`, `equal`: as for `metrics.calibration_bins`.
    - `ax`: matplotlib axes; a new figure by default.
    - `legend`: whether to show a legend below the axes; or a location inside the axes, such as
      `"upper left"`.

    **Returns:** the axes.

    **Raises:** `ImportError` if matplotlib is not installed, and the errors of
    `metrics.calibration_bins`.

    >>> import jax.numpy as jnp
    >>> axes = reliability(jnp.array([[0.9, 0.1], [0.2, 0.8], [0.6, 0.4]]), jnp.array([0, 1, 1]))
    >>> axes.get_title()
    'ECE 0.300, 3 predictions'
    """
    bins = calibration_bins(probabilities, labels, num_bins, equal=equal)
    error = float(ece(probabilities, labels, num_bins, equal=equal))
    axes = axes_for(ax, "plot.reliability", 5.6, 4.8)
    _draw_bins(axes, bins)
    style = {"ha": "center", "va": "bottom", "fontsize": 7, "color": INK}
    style["rotation"] = 90 if num_bins > 8 else 0
    for left, right, number in zip(bins.edges[:-1], bins.edges[1:], bins.count, strict=True):
        if number:
            axes.text((left + right) / 2, 0.015, f"{number:,}", **style)
    axes.set_title(f"ECE {error:.3f}, {len(labels):,} predictions", fontsize=10)
    axes.set_xlabel("confidence (in the bars: how many predictions)")
    axes.set_ylabel("accuracy in the bin")
    return finished(axes, legend)


def _draw_bins(axes: Any, bins: CalibrationBins) -> None:
    """Draws the bar and point of each bin that is not empty, and the diagonal."""
    edges, count, confidence, accuracy = bins
    is_filled = np.asarray(count) > 0
    left, width, count, confidence, accuracy = (
        np.asarray(each)[is_filled]
        for each in (edges[:-1], np.diff(edges), count, confidence, accuracy)
    )
    lower, upper = _wilson_interval(accuracy, count)
    # Bars of few predictions are fainter.
    for place, height, size, number in zip(left, accuracy, width, count, strict=True):
        alpha = 0.35 if number >= _FEW else 0.12
        axes.bar(place, height, size, align="edge", color=BLUE, alpha=alpha, edgecolor="w")
    axes.plot([0, 1], [0, 1], color=GREY, linestyle="--", linewidth=1, label="as claimed")
    style = {"fmt": "o", "markersize": 5, "elinewidth": 1.2, "capsize": 2.5}
    style |= {"clip_on": False, "zorder": 3, "label": "accuracy, 90% interval"}
    around = accuracy - lower, upper - accuracy
    axes.errorbar(confidence, accuracy, yerr=around, color=BLUE, **style)
    axes.set_xticks([0, 0.25, 0.5, 0.75, 1], ["0", "0.25", "0.5", "0.75", "1"])
    axes.set(xlim=(0, 1), ylim=(0, 1))


def _wilson_interval(fraction: np.ndarray, count: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Wilson's 90% score interval of a fraction; valid near 0 and 1 and for small counts."""
    z = 1.645
    middle = (fraction + z**2 / (2 * count)) / (1 + z**2 / count)
    spread = np.sqrt(fraction * (1 - fraction) / count + z**2 / (4 * count**2))
    half = z / (1 + z**2 / count) * spread
    return np.minimum(middle - half, fraction), np.maximum(middle + half, fraction)


# --- Coverage of intervals ---


_LEVELS = np.linspace(0, 1, 101)
_BAND = 0.9


def coverage(
    prediction: Mixture, y: Float[Array, " N"], *, ax: Any = None, legend: bool | str = True
) -> Any:
    """Plots the fraction of observations in the central interval of each level.

    If predictions are calibrated, the curve lies on the diagonal. Below the diagonal, intervals are
    too narrow. Above it, they are too wide. For N observations, the curve of a calibrated
    prediction lies in the grey band with probability 90% at each level.

    **Arguments:**

    - `prediction`: a prediction for each observation.
    - `y`: observations, shape `(N,)`.
    - `ax`: matplotlib axes; a new figure by default.
    - `legend`: whether to show a legend below the axes; or a location inside the axes, such as
      `"upper left"`.

    **Returns:** the axes.

    **Raises:** `ImportError` if matplotlib is not installed. `TypeError` if `prediction` is not a
    mixture. `ValueError` if shapes differ, or there are no observations.

    >>> import jax.numpy as jnp, numpyro.distributions as dist
    >>> axes = coverage(Mixture(dist.Normal(jnp.zeros((1, 3)), 1.0)), jnp.array([-2.0, 0.1, 0.9]))
    >>> axes.get_xlabel()
    'probability of the central interval'
    """
    check_mixture(prediction, Mixture, "plot.coverage")
    if np.ndim(y) != 1 or np.shape(y) != prediction.batch_shape or len(y) == 0:
        raise ValueError(
            "coverage expects y and prediction of the same shape (N,), with N at least 1; got "
            f"{np.shape(y)} and {prediction.batch_shape}."
        )
    axes = axes_for(ax, "plot.coverage", 4.8, 4.6)
    # For each observation, the level of the central interval that just contains it.
    reached = np.abs(2 * np.asarray(prediction.cdf(y)) - 1)
    observed = np.mean(reached[:, None] <= _LEVELS, axis=0)
    ends = [end / len(y) for end in binomial_band(_BAND, len(y), _LEVELS)]
    label = f"{_BAND:.0%} of calibrated predictions"
    axes.fill_between(_LEVELS, *ends, color=tint(GREY, 0.3), lw=0, label=label)
    axes.plot([0, 1], [0, 1], "--", color=GREY, linewidth=1, label="as claimed")
    axes.plot(_LEVELS, observed, color=BLUE, linewidth=1.8, label="observed")
    axes.set(xlim=(0, 1), ylim=(0, 1), aspect="equal")
    axes.set_xlabel("probability of the central interval")
    axes.set_ylabel("fraction of observations inside")
    inside = np.mean(reached <= 0.9)
    axes.set_title(f"90% intervals hold {inside:.1%} of {len(y):,}", fontsize=10)
    return finished(axes, legend)


# --- Simulation-based calibration ---


_RANKS_BAND = 0.99


def sbc_ranks(
    ranks: Int[Array, " N"],
    num_draws: int,
    *,
    num_bins: int = 20,
    ax: Any = None,
    legend: bool | str = True,
) -> Any:
    """Plots the ranks of simulation-based calibration, which `bayes.simulation_ranks` returns.

    Ranks are uniform if the posteriors are correct. They pile up at both ends if posteriors are too
    narrow, and in the middle if they are too wide. The grey band contains the count of a bin with
    probability 99% if ranks are uniform. Talts, Betancourt, Simpson, Vehtari and Gelman (2018),
    "Validating Bayesian Inference Algorithms with Simulation-Based Calibration".

    **Arguments:**

    - `ranks`: for each of N simulations, the number of draws below the true value.
    - `num_draws`: number of independent draws in each simulation.
    - `num_bins`: number of bins, at most `num_draws + 1`.
    - `ax`: matplotlib axes; a new figure by default.
    - `legend`: whether to show a legend below the axes; or a location inside the axes, such as
      `"upper left"`.

    **Returns:** the axes.

    **Raises:** `ImportError` if matplotlib is not installed. `ValueError` if `ranks` has another
    shape or values that are not integers from 0 to `num_draws`, or if `num_draws` or `num_bins` is
    not a positive integer.

    >>> import numpy as np
    >>> axes = sbc_ranks(np.random.default_rng(0).integers(0, 100, 500), num_draws=99)
    >>> axes.get_xlabel()
    'rank of the true value among 99 draws'
    """
    values = np.asarray(ranks)
    num_draws = whole_number(num_draws, "num_draws")
    num_bins = min(whole_number(num_bins, "num_bins"), num_draws + 1)
    if values.ndim != 1 or values.size == 0 or not np.issubdtype(values.dtype, np.integer):
        raise ValueError(
            f"sbc_ranks expects integers of shape (N,), got {values.dtype} of shape {values.shape}."
        )
    if values.min() < 0 or values.max() > num_draws:
        raise ValueError(
            f"sbc_ranks expects ranks from 0 to num_draws, {num_draws}, got ranks from "
            f"{values.min()} to {values.max()}."
        )
    axes = axes_for(ax, "plot.sbc_ranks", 6.0, 3.4)
    # Edges lie between integers. If the ranks cannot be divided evenly, some bins hold one more
    # rank.
    edges = np.round(np.linspace(0, num_draws + 1, num_bins + 1)) - 0.5
    counts = np.histogram(values, edges)[0]
    chances = np.diff(edges) / (num_draws + 1)
    lower, upper = binomial_band(_RANKS_BAND, values.size, chances)
    style = {"align": "edge", "color": tint(BLUE, 0.6), "edgecolor": "white"}
    label = f"{values.size:,} simulations"
    axes.bar(edges[:-1], counts, np.diff(edges), label=label, **style)
    ends = [np.append(end, end[-1]) for end in (lower, upper)]
    style = {"step": "post", "lw": 0, "color": GREY, "alpha": 0.3}
    axes.fill_between(edges, *ends, label=f"{_RANKS_BAND:.0%} of uniform counts", **style)
    expected = values.size * chances
    axes.step(edges, np.append(expected, expected[-1]), "--", where="post", color=INK, linewidth=1)
    most = 1.1 * max(counts.max(), upper.max())
    axes.set(xlim=(edges[0], edges[-1]), ylim=(0, most))
    axes.set_xlabel(f"rank of the true value among {num_draws:,} draws")
    axes.set_ylabel("simulations in the bin")
    return finished(axes, legend)


# --- Bands over an input ---


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
    return finished(axes, legend)


# --- Axes and legends ---


def axes_for(ax: Any, caller: str, width: float = 6.0, height: float = 4.0) -> Any:
    """`ax`, or the axes of a new figure if `ax` is `None`. Width and height are in inches."""
    return new_figure(width, height, caller).add_subplot() if ax is None else ax


def tint(colour: str, strength: float) -> tuple[float, ...]:
    """Mixes a colour with white; `strength=1` is the pure colour."""
    parts = np.array([int(colour[place : place + 2], 16) for place in (1, 3, 5)]) / 255
    return tuple(1 - strength * (1 - parts))


def finished(axes: Any, legend: bool | str) -> Any:
    """The axes with a faint grid, and a legend below them or at a matplotlib location.

    Below the axes, a legend hides neither data nor title. A figure without a layout engine has no
    space there, so the legend is placed inside, at matplotlib's best location. With `False` there
    is no legend.
    """
    tidy(axes)
    if legend is True and axes.figure.get_layout_engine() is not None:
        _add_legend_below(axes)
    elif legend is not False:
        axes.legend(loc="best" if legend is True else legend, fontsize=8, framealpha=0.9)
    return axes


def _add_legend_below(axes: Any) -> None:
    """Adds a legend below the x-axis labels, with as many columns as fit the axes' width."""
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
