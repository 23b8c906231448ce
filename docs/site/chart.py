"""Draws the chart on the home page: `python -m docs.site.chart` writes docs/images/calls-*.svg.

It shows a committed run of `python -m benchmarks.jit_overhead`. A test checks that the files are
up to date.
"""

import json
import math
import pathlib
from collections.abc import Mapping

ROOT = pathlib.Path(__file__).parents[2]
RUN = ROOT / "benchmarks" / "results" / "jit_overhead-cpu-jax-0.10.2.json"
IMAGES = ROOT / "docs" / "images"

BASELINE = "jax.jit, module"
COLUMNS = {
    "filter_jit": "eqxlike filter_jit",
    "Equinox filter_jit": "Equinox filter_jit",
    "nnx.jit": "Flax nnx.jit",
}
ROWS = {
    "Identity, (1, 1)": "Identity",
    "MLP forward, depth 2, width 64": "MLP, 2 layers of 64",
    "Adam step, depth 2, width 8, batch 32": "Adam step, 2 layers of 8",
    "Adam step, depth 64, width 8, batch 32": "Adam step, 64 layers of 8",
}

# Colours of text, light text, lines and columns. Colour-blind readers can tell the columns apart.
THEMES = {
    "light": ("#1f2328", "#59636e", "#d6dae0", ("#0b6bcb", "#d9730d", "#8250b5")),
    "dark": ("#e6e9ee", "#9aa4b2", "#3a4452", ("#6cb2ff", "#ffab5e", "#c3a1f0")),
}

WIDTH, ROW, TOP, LEFT, RIGHT = 560, 78, 58, 12, 536
LOWEST, HIGHEST = 0.5, 50.0
TICKS = (1, 2, 5, 10, 20, 50)


def draw(theme: str) -> str:
    """The chart as SVG.

    **Arguments:**

    - `theme`: `"light"` or `"dark"`.
    """
    ink, soft, line, colours = THEMES[theme]
    report = json.loads(RUN.read_text())
    rows = {row["name"]: row["columns"] for row in report["rows"]}
    bottom = TOP + ROW * len(ROWS)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {bottom + 66}" '
        f'role="img" aria-label="{_said(rows)}" '
        'font-family="system-ui, -apple-system, Segoe UI, Roboto, Noto Sans, sans-serif">'
    ]
    parts += [_text(_x(tick), bottom + 20, f"{tick}×", soft, 13) for tick in TICKS]
    parts.append(_text(_x(1), bottom + 36, "jax.jit", soft, 13))
    x = 16.0
    for colour, title in zip(colours, COLUMNS.values(), strict=True):
        parts.append(f'<circle cx="{x:.0f}" cy="22" r="6" fill="{colour}"/>')
        parts.append(_text(x + 12, 27, title, ink, 14, "start"))
        x += 34 + 7.4 * len(title)
    for index, (name, shown) in enumerate(ROWS.items()):
        y = TOP + ROW * index + 58
        columns = rows[name]
        own = columns[BASELINE]["completion_us"]
        takes = f"{own:.{1 if own < 100 else 0}f} µs with jax.jit"
        parts.append(_text(LEFT, y - 34, shown, ink, 15, "start", weight=600))
        parts.append(_text(WIDTH - LEFT, y - 34, takes, soft, 12, "end"))
        for tick in TICKS:
            weight, shade = (1.6, soft) if tick == 1 else (0.8, line)
            parts.append(
                f'<line x1="{_x(tick)}" x2="{_x(tick)}" y1="{y - 26}" y2="{y + 14}" '
                f'stroke="{shade}" stroke-width="{weight}"/>'
            )
        for colour, column in zip(colours, COLUMNS, strict=True):
            ratio = columns[column]["completion_ratio"]["median"]
            parts.append(f'<circle cx="{_x(ratio)}" cy="{y:.0f}" r="7" fill="{colour}"/>')
            digits = 2 if ratio < 2 else 1 if ratio < 10 else 0
            # The text is next to the line of `jax.jit`, so that the line does not cross it.
            anchor, aside = (
                ("middle", 0) if ratio > 1.5 else ("start", -6) if ratio > 1 else ("end", 6)
            )
            x = float(_x(ratio)) + aside
            parts.append(_text(x, y - 12, f"{ratio:.{digits}f}×", colour, 13, anchor, weight=600))
    parts.append(
        _text(
            16,
            bottom + 58,
            "Time until the result is ready, compared with jax.jit on the same model; "
            "logarithmic scale.",
            soft,
            12,
            "start",
        )
    )
    return "\n".join([*parts, "</svg>"]) + "\n"


def paths() -> dict[str, pathlib.Path]:
    return {theme: IMAGES / f"calls-{theme}.svg" for theme in THEMES}


def _x(ratio: float) -> str:
    share = math.log(ratio / LOWEST) / math.log(HIGHEST / LOWEST)
    return f"{LEFT + share * (RIGHT - LEFT):.1f}"


def _text(
    x: float | str,
    y: float,
    text: str,
    colour: str,
    size: int,
    anchor: str = "middle",
    weight: int = 400,
) -> str:
    return (
        f'<text x="{x}" y="{y:.0f}" fill="{colour}" font-size="{size}" font-weight="{weight}" '
        f'text-anchor="{anchor}">{text}</text>'
    )


def _said(rows: Mapping[str, Mapping[str, Mapping[str, Mapping[str, float]]]]) -> str:
    """A description of the chart for screen readers."""
    said = [
        f"{shown}: "
        + ", ".join(
            f"{title} {rows[name][column]['completion_ratio']['median']:.2f}"
            for column, title in COLUMNS.items()
        )
        for name, shown in ROWS.items()
    ]
    return f"Time of a call as a multiple of jax.jit. {'; '.join(said)}."


if __name__ == "__main__":
    for theme, path in paths().items():
        path.write_text(draw(theme))
