"""Tables of text and of HTML, pages, and figures without a window system or global state."""

import html
import json
import pathlib
from collections.abc import Iterable, Mapping, Sequence
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


# --- Pages of HTML, which fetch nothing from elsewhere ---


def page_from(template: pathlib.Path, parts: Mapping[str, str]) -> str:
    """The template with each part in the place of its name between `@@`."""
    # In one go: what is put in may look like a mark.
    pieces = template.read_text(encoding="utf-8").split("@@")
    return "".join(parts.get(piece, piece) for piece in pieces)


def html_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """The rows below the header; the cells of a column of words are of the class `name`."""
    to_the_right = _numeric_columns(header, rows)

    def row(cells: Iterable[str], tag: str) -> str:
        kinds = ("" if right else ' class="name"' for right in to_the_right)
        return "".join(
            f"<{tag}{kind}>{html.escape(cell)}</{tag}>"
            for kind, cell in zip(kinds, cells, strict=True)
        )

    body = "".join(f"<tr>{row(cells, 'td')}</tr>" for cells in rows)
    return (
        f'<div class="scroll"><table><thead><tr>{row(header, "th")}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )


def html_warnings(texts: Iterable[str]) -> str:
    """A paragraph for each text."""
    return "".join(f'<p class="warning">{html.escape(text)}</p>' for text in texts)


def script_of(value: Any) -> str:
    """JSON for the inside of a script, where `</` and `<!--` would end it or hide its end."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")


# --- Figures of matplotlib ---


BLUE, ORANGE, GREY, INK = "#2b6cb0", "#dd8a2b", "#777777", "#333333"


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
