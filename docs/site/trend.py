"""The page of trends: charts and tables of the key figures of all committed runs.

The figures come from `benchmarks/results/history.jsonl`. `python -m benchmarks.trend --add` adds
runs to it.
"""

import html
import itertools
from collections.abc import Iterator, Sequence

from benchmarks import trend
from benchmarks.trend import Figure, Point
from docs.site.links import HOME

PATH = "measured/trend.md"
TITLE = "Trend"
WIDTH, HEIGHT = 300, 116
LEFT, RIGHT, TOP, BOTTOM = 16, 284, 32, 84

INTRODUCTION = f"""\
This page shows how key figures changed from one committed run to the next, the oldest on the left.
Unless a title says otherwise, a figure is a ratio within its run, and less is better. The dashed
line is 1. A line joins runs with the same version of JAX on the same kind of processor; runs on two
kinds of processor cannot be compared. A run is missing from a chart if the benchmark did not have
that figure then. On shared machines figures change without any change of the code. Look for figures
that changed and stayed.

`python -m benchmarks.trend --add` adds a run to
[history.jsonl]({HOME}/benchmarks/results/history.jsonl)."""


def page(titles: dict[str, str]) -> str:
    """The page as Markdown.

    **Arguments:**

    - `titles`: the title of each benchmark, in the order of the page.
    """
    points = sorted(trend.history(), key=lambda each: each["machine"]["date"])
    parts = ["---\nhide:\n  - toc\n---", f"# {TITLE}", INTRODUCTION]
    for name, title in titles.items():
        found = [each for each in points if each["benchmark"] == name and each["figures"]]
        if found:
            parts += [f"## {title}", *_section(trend.FIGURES[name], found)]
    return "\n\n".join(parts) + "\n"


def chart(figure: Figure, points: Sequence[Point]) -> str:
    """An SVG chart of a figure over the runs of its benchmark, with a line for each version of JAX.

    **Arguments:**

    - `figure`: the figure.
    - `points`: the runs of the benchmark, the oldest first.
    """
    places = {trend.key(each): index for index, each in enumerate(points)}
    has = [each for each in points if figure.title in each["figures"]]
    values = [each["figures"][figure.title] for each in has]
    least, most = min(values), max(values)
    is_near_one = least - 0.3 < 1 < most + 0.3
    if is_near_one:
        least, most = min(least, 1), max(most, 1)
    margin = (most - least) / 10 or abs(most) / 10
    least, most = least - margin, most + margin

    def x(each: Point) -> float:
        return LEFT + 20 + (RIGHT - LEFT - 40) * places[trend.key(each)] / max(1, len(points) - 1)

    def y(value: float) -> float:
        return BOTTOM - (value - least) / (most - least) * (BOTTOM - TOP)

    better = "more is better" if figure.more_is_better else "less is better"
    said = "; ".join(f"{_run(each)}: {each['figures'][figure.title]:.3g}" for each in has)
    parts = [
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        f'aria-label="{html.escape(f"{figure.title}, {better}. {said}", quote=True)}">'
    ]
    if is_near_one:
        parts.append(f'<line class="one" x1="0" x2="{WIDTH}" y1="{y(1):.1f}" y2="{y(1):.1f}"/>')
    for index, version in enumerate(_versions(points)):
        own = [each for each in has if each["machine"]["jax"] == version]
        for before, after in itertools.pairwise(own):
            if _processor(before) == _processor(after):
                ends = [(x(each), y(each["figures"][figure.title])) for each in (before, after)]
                parts.append(
                    f'<line class="jax-{index}" x1="{ends[0][0]:.1f}" y1="{ends[0][1]:.1f}" '
                    f'x2="{ends[1][0]:.1f}" y2="{ends[1][1]:.1f}"/>'
                )
        for each in own:
            value = each["figures"][figure.title]
            parts.append(
                f'<circle class="jax-{index}" cx="{x(each):.1f}" cy="{y(value):.1f}" r="4">'
                f"<title>{html.escape(_run(each))}</title></circle>"
            )
            # With many points, only the last point of a line has a label.
            if len(points) <= 6 or each is own[-1]:
                parts.append(
                    f'<text x="{x(each):.1f}" y="{y(value) - 8:.1f}">{_number(value)}</text>'
                )
    for each, anchor, place in ((points[0], "start", 0), (points[-1], "end", WIDTH)):
        parts.append(
            f'<text class="date" x="{place}" y="{HEIGHT - 6}" text-anchor="{anchor}">'
            f"{_date(each)}</text>"
        )
    return "\n".join([*parts, "</svg>"])


def _section(figures: Sequence[Figure], points: Sequence[Point]) -> Iterator[str]:
    """The charts of the figures with at least two runs, and the table of all figures."""
    shown = [
        figure for figure in figures if any(figure.title in each["figures"] for each in points)
    ]
    drawn = [
        f"<figure>\n<figcaption>{html.escape(figure.title)}</figcaption>\n"
        f"{chart(figure, points)}\n</figure>"
        for figure in shown
        if sum(figure.title in each["figures"] for each in points) > 1
    ]
    if drawn:
        versions = "".join(
            f'<span class="jax-{index}">jax {version}</span>'
            for index, version in enumerate(_versions(points))
        )
        charts = "\n".join(drawn)
        yield f'<div class="trend">\n<p>{versions}</p>\n{charts}\n</div>'
    else:
        yield "There is one run of each so far."
    yield _table(shown, points)


def _table(figures: Sequence[Figure], points: Sequence[Point]) -> str:
    """A table with a row for each run, the newest first."""
    heads = ["run", *(_cell(figure.title) for figure in figures), "note"]
    lines = [heads, ["---", *["---:"] * len(figures), "---"]]
    for each in reversed(points):
        cells = [
            _number(each["figures"][figure.title]) if figure.title in each["figures"] else ""
            for figure in figures
        ]
        is_whole = "" if each["is_complete"] else ", not all of it"
        lines.append([_run(each) + is_whole, *cells, _cell(each["said"])])
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _versions(points: Sequence[Point]) -> list[str]:
    versions = {each["machine"]["jax"] for each in points}
    return sorted(versions, key=lambda version: [int(part) for part in version.split(".")])


def _processor(each: Point) -> str:
    machine = each["machine"]
    name = machine["cpu"] if machine.get("backend", "cpu") == "cpu" else machine["device"]
    return name.replace("(R)", "").removesuffix(" Processor")


def _run(each: Point) -> str:
    machine = each["machine"]
    return f"{_date(each)}, eqxlike {machine['eqxlike']}, jax {machine['jax']}, {_processor(each)}"


def _date(each: Point) -> str:
    day, _, time = each["machine"]["date"].partition("T")
    return f"{day} {time[:5]}"


def _number(value: float) -> str:
    return f"{value:.3f}" if value < 0.1 else f"{value:.2f}" if value < 10 else f"{value:.0f}"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("_", "\\_")
