"""The draws of Markov chains, one after another."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Array, Float

from ..._figures import new_figure, tidy
from ._axes import DISTINCT, add_legend, axes_for


def traces(
    draws: Float[Array, "chains draws"] | Float[Array, "chains draws K"],
    names: Sequence[str] | str | None = None,
    *,
    ax: Any = None,
    legend: bool | str = True,
) -> Any:
    """The draws of each chain in their order: chains that have mixed lie on each other.

    **Arguments:**

    - `draws`: of one unknown, shape `(chains, draws)`, or of K, shape `(chains, draws, K)`.
    - `names`: of the unknown, or of each.
    - `ax`: axes of matplotlib, for K unknowns a sequence of as many; those of a new figure if there
      are none.
    - `legend`: whether there is one, below the last axes; or where in them, in matplotlib's words,
      such as `"upper left"`. More chains than colours have none.

    **Returns:** the axes, for K unknowns an array of shape `(K,)`.

    **Raises:** `ImportError` if matplotlib is not installed; `ValueError` for another shape, or
    another number of names or axes than of unknowns.

    >>> import numpy as np
    >>> draws = np.random.default_rng(0).normal(size=(4, 100, 2))
    >>> [axes.get_ylabel() for axes in traces(draws, ["slope", "intercept"])]
    ['slope', 'intercept']
    """
    values = np.asarray(draws)
    if values.ndim not in (2, 3) or 0 in values.shape:
        raise ValueError(
            "traces expects draws of shape (chains, draws) or (chains, draws, K), got shape "
            f"{values.shape}."
        )
    is_one = values.ndim == 2
    values = values[..., None] if is_one else values
    size = values.shape[-1]
    labels = _names(names, size)
    if is_one:
        panels = [axes_for(ax, "plot.traces", 7.0, 2.6)]
    elif ax is None:
        figure = new_figure(7.0, 0.6 + 1.6 * size, "plot.traces")
        panels = list(figure.subplots(size, 1, sharex=True, squeeze=False)[:, 0])
    else:
        panels = list(np.ravel(ax))
    if len(panels) != size:
        raise ValueError(f"traces of {size} unknowns expects as many axes, got {len(panels)}.")
    for axes, label, of_chains in zip(panels, labels, np.moveaxis(values, -1, 0), strict=True):
        for chain, line in enumerate(of_chains):
            colour = DISTINCT[chain % len(DISTINCT)]
            axes.plot(line, color=colour, linewidth=0.7, alpha=0.8, label=f"chain {chain + 1}")
        axes.set_ylabel(label)
        axes.margins(x=0)
        tidy(axes)
    panels[-1].set_xlabel("draw")
    if len(values) <= len(DISTINCT):
        drawn = add_legend(panels[-1], legend)
        for line in drawn.get_lines() if drawn is not None else ():
            line.set_linewidth(2)
    return panels[0] if is_one else np.array(panels)


def _names(names: Sequence[str] | str | None, size: int) -> list[str]:
    if names is None:
        return ["value"] if size == 1 else [f"unknown {index}" for index in range(size)]
    listed = [names] if isinstance(names, str) else list(names)
    if len(listed) != size:
        raise ValueError(f"traces of {size} unknowns expects as many names, got {listed}.")
    return listed
