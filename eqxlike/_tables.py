"""Tables as text and HTML, HTML pages, and matplotlib figures without pyplot."""

import html
import json
import pathlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any


def grouped(number: float | None) -> str:
    """A number with thousands separators; a dash for `None`."""
    return "-" if number is None else f"{number:,.0f}"


def align(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table as plain text. Numeric columns are aligned to the right, others to the left."""
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
    """A table for rich. It is called from `__rich__`, so rich is installed."""
    from rich.table import Table
    from rich.text import Text

    table = Table(caption=caption)
    to_the_right = _numeric_columns(header, rows)
    for name, right in zip(header, to_the_right, strict=True):
        justify = "right" if right else "left"
        table.add_column(name, justify=justify, overflow="fold")
    for row in rows:
        # If the cells were strings, rich would parse the brackets in a path as markup.
        table.add_row(*map(Text, row))
    return table


def _numeric_columns(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[bool]:
    columns = [{*cells} - {"", "-"} for _, *cells in zip(header, *rows, strict=True)]
    return [
        bool(cells) and all(cell.removeprefix("-")[:1].isdigit() for cell in cells)
        for cells in columns
    ]


# --- HTML pages. They load nothing from other places ---


def page_from(template: pathlib.Path, parts: Mapping[str, str]) -> str:
    """Returns the template, in which each `@@name@@` is replaced by the part with this name."""
    # All names are replaced in one pass, since a part may contain `@@` itself.
    pieces = template.read_text(encoding="utf-8").split("@@")
    return "".join(parts.get(piece, piece) for piece in pieces)


def html_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table as HTML. In columns that are not numeric, the cells have the CSS class `name`."""
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
    """An HTML paragraph for each text."""
    return "".join(f'<p class="warning">{html.escape(text)}</p>' for text in texts)


def script_of(value: Any) -> str:
    """JSON for a `<script>` element. It contains no `</` or `<!--`, which would break the page."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")


# --- matplotlib figures ---


BLUE, ORANGE, GREY, INK = "#2b6cb0", "#dd8a2b", "#777777", "#333333"


def new_figure(width: float, height: float, caller: str) -> Any:
    """A matplotlib figure, sized in inches, that is not registered with pyplot.

    **Raises:** `ImportError` if matplotlib is not installed. The message names `caller`.
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
    """Removes the top and right spines, and draws a faint grid below the data."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25, linewidth=0.6)
    axes.set_axisbelow(True)
