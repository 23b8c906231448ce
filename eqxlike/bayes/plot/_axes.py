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


def legend_above(axes: Any, columns: int) -> Any:
    """A legend that hides no data, in so many columns; returns it."""
    return axes.legend(
        loc="lower right", bbox_to_anchor=(1, 1), ncols=columns, fontsize=8, frameon=False
    )
