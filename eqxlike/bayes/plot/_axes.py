"""Axes to draw in, and colours that tell chains apart."""

from typing import Any

import numpy as np

from ..._figures import new_figure

# Okabe and Ito (2008), "Color Universal Design", less yellow, which is faint on white.
DISTINCT = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#000000")


def axes_for(ax: Any, caller: str, width: float = 6.0, height: float = 4.0) -> Any:
    """`ax`, or if that is `None` the axes of a new figure of so many inches."""
    return new_figure(width, height, caller).add_subplot() if ax is None else ax


def tint(colour: str, strength: float) -> tuple[float, ...]:
    """The colour in white, of which 1 leaves nothing."""
    parts = np.array([int(colour[place : place + 2], 16) for place in (1, 3, 5)]) / 255
    return tuple(1 - strength * (1 - parts))


def add_legend(axes: Any, legend: bool | str) -> Any:
    """A legend below the axes, or where a string says in matplotlib's words; `False` is for none.

    Below the axes it hides neither data nor a title. A figure without a layout makes no room for it
    there: then it is inside of them, where matplotlib finds most.

    **Returns:** the legend, or `None`.
    """
    if legend is False:
        return None
    if legend is not True or axes.figure.get_layout_engine() is None:
        place = "best" if legend is True else legend
        return axes.legend(loc=place, fontsize=8, framealpha=0.9)
    return _legend_below(axes)


def _legend_below(axes: Any) -> Any:
    """A legend under the labels of the x-axis, in as many columns as are no wider than the axes."""
    from matplotlib.transforms import ScaledTranslation

    labels, figure = axes.xaxis.get_tightbbox(), axes.figure
    drop = 0 if labels is None else labels.y0 - axes.bbox.y0
    below = ScaledTranslation(0, drop / figure.dpi, figure.dpi_scale_trans)
    for columns in range(len(axes.get_legend_handles_labels()[0]), 0, -1):
        legend = axes.legend(
            loc="upper center",
            bbox_to_anchor=(0.5, 0),
            bbox_transform=axes.transAxes + below,
            ncols=columns,
            fontsize=8,
            frameon=False,
        )
        if legend.get_window_extent().width <= axes.bbox.width:
            break
    return axes.get_legend()
