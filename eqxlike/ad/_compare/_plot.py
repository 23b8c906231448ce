"""A comparison as a picture."""

import math
from collections.abc import Iterator, Sequence
from typing import Any

from ..._figures import BLUE, GREY, ORANGE, RED, new_figure, tidy

_COLOURS = {"ok": BLUE, "wrong": RED, "nan": ORANGE, "error": GREY}

# The size of a label, in parts of the axes; a letter is about so wide in a figure of this size.
_LINE, _LETTER = 0.06, 0.014
_AWAY = 0.02


def plot(rows: Sequence[Any]) -> Any:
    """Time against memory, as `Comparison.plot` says.

    **Arguments:**

    - `rows`: each a `ComparisonRow`.
    """
    rows = [row for row in rows if row.gradient_us is not None and row.peak_bytes is not None]
    if not rows:
        raise ValueError("Comparison.plot: no mode was measured, so there is nothing to draw.")
    figure = new_figure(8, 4.5, "Comparison.plot")
    from matplotlib.ticker import LogFormatter

    axes = figure.add_subplot()
    for verdict in dict.fromkeys(row.verdict for row in rows):
        times = [row.gradient_us for row in rows if row.verdict == verdict]
        sizes = [row.peak_bytes for row in rows if row.verdict == verdict]
        axes.scatter(times, sizes, color=_COLOURS[verdict], label=verdict, zorder=2, clip_on=False)
    axes.set_xscale("log")
    # Logarithmic from one byte on, and with a place for none.
    axes.set_yscale("symlog", linthresh=1, linscale=0.3)
    times, sizes = [row.gradient_us for row in rows], [row.peak_bytes for row in rows]
    axes.set_xlim(min(times) / 1.5, max(times) * 1.5)
    axes.set_ylim(_decade(min(sizes), math.floor), 2 * _decade(max(sizes), math.ceil))
    axes.xaxis.set_major_formatter(LogFormatter())
    axes.xaxis.set_minor_formatter(LogFormatter(minor_thresholds=(1, 0.5)))
    axes.set_xlabel("Time of value and gradient (microseconds)")
    axes.set_ylabel("Peak temporary memory (bytes)")
    tidy(axes)
    figure.legend(title="Verdict", loc="outside right upper", frameon=False)
    _label(axes, rows)
    return figure


def _decade(size: int, rounded: Any) -> float:
    """A power of ten beside `size`."""
    return 10.0 ** rounded(math.log10(size)) if size else -0.5 if rounded is math.floor else 1.0


def _label(axes: Any, rows: Sequence[Any]) -> None:
    """Writes the name beside each point, above or below it where it would lie on another."""
    to_axes = axes.transData + axes.transAxes.inverted()
    points = [to_axes.transform((row.gradient_us, row.peak_bytes)) for row in rows]
    taken = [(x - 0.01, x + 0.01, y) for x, y in points]
    for row, (x, y) in zip(rows, points, strict=True):
        width = _LETTER * len(row.mode)
        is_left = x + _AWAY + width > 1
        left = x - _AWAY - width if is_left else x + _AWAY
        height = next(
            height
            for height in _heights(y)
            if not any(
                left < end and start < left + width and abs(height - other) < _LINE
                for start, end, other in taken
            )
        )
        taken.append((left, left + width, height))
        axes.annotate(
            row.mode,
            (row.gradient_us, row.peak_bytes),
            (x - _AWAY if is_left else x + _AWAY, height),
            textcoords="axes fraction",
            va="center",
            ha="right" if is_left else "left",
            color=_COLOURS[row.verdict],
            arrowprops={"arrowstyle": "-", "color": "#aaaaaa", "linewidth": 0.6},
        )


def _heights(height: float) -> Iterator[float]:
    """`height`, and then further and further away from it."""
    yield height
    for distance in range(1, 1000):
        yield height + distance * _LINE / 2
        yield height - distance * _LINE / 2
