"""The demo's results as tables: by rich on a terminal that has it, as aligned text elsewhere."""

import importlib.util
import sys
from collections.abc import Mapping, Sequence

from ._baselines import baseline_name
from ._compare import BAYESIAN, PLAIN, Output
from ._evaluate import LEVEL
from ._methods import METHODS

TITLES = {
    BAYESIAN: "Bayesian MLP",
    PLAIN: "plain MLP",
    "ridge": "ridge regression",
    "logistic": "logistic regression",
} | {name: choice.title for name, choice in METHODS.items()}
"""The titles of models in tables and pictures, by name."""

METRICS = {
    "rmse": ("RMSE", ".1f"),
    "accuracy": ("accuracy", ".1%"),
    "nll": ("NLL (nats)", ".4f"),
    "coverage": (f"in {LEVEL:.0%} interval", ".1%"),
    "width": ("interval width", ".0f"),
    "ece": ("ECE", ".4f"),
    "seconds": ("seconds", ".0f"),
}
"""The heading and the format of each metric, by name."""


def print_metrics(output: Output) -> None:
    """Prints the models side by side, on the test part."""
    found = {name: each.metrics for name, each in output.evaluations.items()}
    if not found:
        return
    order = (BAYESIAN, PLAIN, baseline_name(output.data), *METHODS)
    names = [name for name in order if name in found]
    shown = [metric for metric in METRICS if any(metric in each for each in found.values())]
    rows = [[TITLES[name], *(_cell(found[name], metric) for metric in shown)] for name in names]
    title = f"{output.data.name}: {len(output.data.test)} held-out examples"
    print_table(title, ["", *(METRICS[metric][0] for metric in shown)], rows)
    if (weight := output.settings.kl_weight) != 1:
        print(f"  ({TITLES[BAYESIAN]}: KL weight {weight:g}, a tempered posterior)")


def _cell(metrics: Mapping[str, float], metric: str) -> str:
    return format(metrics[metric], METRICS[metric][1]) if metric in metrics else ""


def print_dispatch(outputs: Mapping[str, Output]) -> None:
    """Prints what calls cost, in microseconds and as ratios to the baseline."""
    rows = [
        [
            f"{name}, {row}",
            column.name,
            f"{column.dispatch_us:.1f}",
            f"{column.dispatch_ratio.median:.2f}",
            f"{column.completion_us:.1f}",
            f"{column.completion_ratio.median:.2f}",
        ]
        for name, output in outputs.items()
        for row, measured in output.dispatch.items()
        for column in measured.columns.values()
    ]
    if rows:
        title = "what a call costs: until it returns (dispatch), until its result is ready"
        headings = ["", "called by", "dispatch (us)", "ratio", "completion (us)", "ratio"]
        print_table(title, headings, rows)


def print_table(title: str, headings: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Prints a table, its numbers flush right."""
    if sys.stdout.isatty() and importlib.util.find_spec("rich") is not None:
        _print_rich(title, headings, rows)
    else:
        print("\n" + plain_table(title, headings, rows))


def plain_table(title: str, headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table as aligned text.

    >>> print(plain_table("two", ["", "RMSE"], [["a", "1.5"], ["long", "12.5"]]))
    two
            RMSE
      a      1.5
      long  12.5
    """
    is_number = _number_columns(rows)
    widths = [max(map(len, column)) for column in zip(headings, *rows, strict=True)]
    lines = [
        "  ".join(
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(row, widths, is_number, strict=True)
        ).rstrip()
        for row in (headings, *rows)
    ]
    return "\n".join([title, *(f"  {line}" for line in lines)])


def _number_columns(rows: Sequence[Sequence[str]]) -> list[bool]:
    columns = zip(*rows, strict=True)
    return [all(cell[:1] in "-0123456789" for cell in column) for column in columns]


def _print_rich(title: str, headings: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    for heading, is_number in zip(headings, _number_columns(rows), strict=True):
        table.add_column(heading, justify="right" if is_number else "left")
    for row in rows:
        table.add_row(*row)
    console = Console()
    console.print()
    console.print(table)
