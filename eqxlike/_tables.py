"""Tables of text, and figures without a window system or global state."""

from collections.abc import Sequence
from typing import Any


def grouped(number: float | None) -> str:
    """A number with its digits in groups; a dash for none."""
    return "-" if number is None else f"{number:,.0f}"


def align(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """The rows below the header as plain text: numbers to the right, words to the left."""
    lines = [header, *rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    to_the_right = _numeric_columns(header, rows)
    return "\n".join(
        "  ".join(
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(line, widths, to_the_right, strict=True)
        ).rstrip()
        for line in lines
    )


def rich_table(header: Sequence[str], rows: Sequence[Sequence[str]], caption: str) -> Any:
    """The same as a table of rich, which asks for it and so is there."""
    from rich.table import Table
    from rich.text import Text

    table = Table(caption=caption)
    to_the_right = _numeric_columns(header, rows)
    for name, right in zip(header, to_the_right, strict=True):
        justify = "right" if right else "left"
        table.add_column(name, justify=justify, overflow="fold")
    for row in rows:
        # As text: in a string rich would take the brackets of a path for markup.
        table.add_row(*map(Text, row))
    return table


def _numeric_columns(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[bool]:
    return [_is_numeric(cells) for _, *cells in zip(header, *rows, strict=True)]


def _is_numeric(cells: Sequence[str]) -> bool:
    numbers = [cell for cell in cells if cell not in ("", "-")]
    return bool(numbers) and all(number.removeprefix("-")[:1].isdigit() for number in numbers)


# --- Figures of matplotlib ---


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
