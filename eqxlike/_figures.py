"""What the pictures of the package have in common: no window system, no global state."""

from typing import Any

BLUE, ORANGE, GREEN, RED, GREY = "#2b6cb0", "#dd8a2b", "#3a9a5c", "#c53030", "#777777"
INK = "#333333"


def new_figure(width: float, height: float, caller: str) -> Any:
    """A figure of matplotlib, sized in inches, that pyplot does not know.

    **Raises:** `ImportError` in the name of `caller` if matplotlib is not installed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(f"{caller} needs matplotlib: `pip install 'eqxlike[plot]'`.") from error
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def tidy(axes: Any) -> None:
    """Takes the frame's upper and right line away, and lays a faint grid below the data."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25, linewidth=0.6)
    axes.set_axisbelow(True)
