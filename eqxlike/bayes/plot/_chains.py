"""Rank plots of chains and of simulation-based calibration."""

from typing import Any

import numpy as np
from jaxtyping import Array, Float, Int

from ..._check_numbers import whole_number
from ..._tables import BLUE, GREY, INK, tidy
from ._bands import DISTINCT, add_legend, axes_for, binomial_band, tint

_BAND = 0.99


def ranks(
    draws: Float[Array, "chains draws"],
    *,
    num_bins: int = 20,
    ax: Any = None,
    legend: bool | str = True,
) -> Any:
    """Plots a histogram for each chain: the ranks of its draws among the draws of all chains.

    If chains have mixed, ranks are uniform, as the dashed line shows. A chain that is stuck has
    most ranks in a few bins. Vehtari, Gelman, Simpson, Carpenter and Bürkner (2021),
    "Rank-Normalization, Folding, and Localization".

    **Arguments:**

    - `draws`: draws of one unknown.
    - `num_bins`: number of bins of each histogram.
    - `ax`: matplotlib axes; a new figure by default.
    - `legend`: whether to show a legend below the axes; or a location inside the axes, such as
      `"upper left"`.

    **Returns:** the axes.

    **Raises:** `ImportError` if matplotlib is not installed. `ValueError` if `draws` has another
    shape or a value that is not finite, or if `num_bins` is not a positive integer.

    >>> import numpy as np
    >>> axes = ranks(np.random.default_rng(0).normal(size=(4, 250)))
    >>> [text.get_text() for text in axes.get_yticklabels()]
    ['chain 1', 'chain 2', 'chain 3', 'chain 4']
    """
    values, num_bins = np.asarray(draws), whole_number(num_bins, "num_bins")
    if values.ndim != 2 or 0 in values.shape:
        raise ValueError(f"ranks expects draws of shape (chains, draws), got shape {values.shape}.")
    if not np.isfinite(values).all():
        raise ValueError(f"ranks: {np.sum(~np.isfinite(values))} draws are not finite.")
    chains, num_draws = values.shape
    axes = axes_for(ax, "plot.ranks", 6.0, 1.2 + 0.8 * chains)
    edges = np.linspace(0, values.size, num_bins + 1)
    counts = np.array([np.histogram(row, edges)[0] for row in _ranks(values) - 0.5])
    apart, expected = 1.15 * counts.max(), num_draws / num_bins
    floors = -apart * np.arange(chains)
    style = {"align": "edge", "edgecolor": "white", "alpha": 0.75}
    label = f"uniform: {expected:g} draws a bin"
    for chain, (floor, heights) in enumerate(zip(floors, counts, strict=True)):
        colour = DISTINCT[chain % len(DISTINCT)]
        axes.bar(edges[:-1], heights, np.diff(edges), floor, color=colour, **style)
        level = [floor + expected] * 2
        axes.plot(edges[[0, -1]], level, "--", color=INK, linewidth=1, label=label)
        label = None
    axes.set_yticks(floors + expected / 2, [f"chain {chain + 1}" for chain in range(chains)])
    axes.set_xlim(0, values.size)
    axes.set_xlabel(f"rank among the {values.size:,} draws of all chains")
    tidy(axes)
    axes.grid(axis="y", visible=False)
    add_legend(axes, legend)
    return axes


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
    lower, upper = binomial_band(_BAND, values.size, chances)
    style = {"align": "edge", "color": tint(BLUE, 0.6), "edgecolor": "white"}
    label = f"{values.size:,} simulations"
    axes.bar(edges[:-1], counts, np.diff(edges), label=label, **style)
    ends = [np.append(end, end[-1]) for end in (lower, upper)]
    style = {"step": "post", "lw": 0, "color": GREY, "alpha": 0.3}
    axes.fill_between(edges, *ends, label=f"{_BAND:.0%} of uniform counts", **style)
    expected = values.size * chances
    axes.step(edges, np.append(expected, expected[-1]), "--", where="post", color=INK, linewidth=1)
    most = 1.1 * max(counts.max(), upper.max())
    axes.set(xlim=(edges[0], edges[-1]), ylim=(0, most))
    axes.set_xlabel(f"rank of the true value among {num_draws:,} draws")
    axes.set_ylabel("simulations in the bin")
    tidy(axes)
    add_legend(axes, legend)
    return axes


def _ranks(values: np.ndarray) -> np.ndarray:
    """Ranks from 1; equal values share the mean of their ranks."""
    _, index, counts = np.unique(values, return_inverse=True, return_counts=True)
    means = np.cumsum(counts) - (counts - 1) / 2
    return means[index].reshape(values.shape)
