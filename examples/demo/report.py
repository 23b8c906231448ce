"""The report of a run of the demo: tables to print, JSON, and one page of HTML.

This file makes the tables of the page. The script in the template draws the pictures.
"""

import datetime
import html
import importlib.metadata
import json
import math
import os
import pathlib
import platform
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from .compare import BAYESIAN, PLAIN
from .evaluate import LEVEL, METHODS
from .training import Settings

PACKAGES = ("eqxlike", "jax", "jaxlib", "numpy", "matplotlib", "optax", "scikit-learn")


def machine() -> dict[str, Any]:
    """The versions of the libraries, and the machine."""
    device, cpuinfo = jax.devices()[0], pathlib.Path("/proc/cpuinfo")
    cpu = re.search(r"model name\s*: (.*)", cpuinfo.read_text() if cpuinfo.exists() else "")
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpu": cpu[1] if cpu else platform.machine(),
        "cores": os.cpu_count(),
        "backend": device.platform,
        "device": device.device_kind,
        "devices": jax.device_count(),
    } | {name: importlib.metadata.version(name) for name in PACKAGES}


def plain(value: Any) -> Any:
    """Converts a value for JSON: rounded to six digits, None for NaN and infinity."""
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, np.ndarray | np.generic | jax.Array):
        value = value.tolist()
    if isinstance(value, list):
        return [plain(item) for item in value]
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    return value


def write(contents: Mapping[str, Any], folder: pathlib.Path) -> list[pathlib.Path]:
    """Writes a report as a page and as JSON; returns the files."""
    page, results = folder / "report.html", folder / "results.json"
    results.write_text(json.dumps(contents, indent=1, allow_nan=False) + "\n")
    page.write_text(page_of(contents), encoding="utf-8")
    return [page, results]


# --- Tables ---


TITLES = {
    BAYESIAN: "Bayesian MLP",
    PLAIN: "plain MLP",
    "ridge": "ridge regression",
    "logistic": "logistic regression",
} | {name: title for name, (title, _) in METHODS.items()}
"""The titles of models in tables and pictures, by name: the two networks first, then the baselines,
then the rest.
"""


METRICS = {
    "rmse": ("RMSE", ".1f"),
    "accuracy": ("accuracy", ".1%"),
    "nll": ("NLL (nats)", ".4f"),
    "coverage": (f"in {LEVEL:.0%} interval", ".1%"),
    "width": ("interval width", ".0f"),
    "ece": ("ECE", ".4f"),
    "seconds": ("seconds", ".0f"),
}
"""The heading and the format of each metric, by name. The template explains the metrics."""

ON_PAGE = METRICS | {"noise": ("noise", ".1f")}


def print_tables(contents: Mapping[str, Any]) -> None:
    """Prints the scores of the models on the test part, and the cost of calls."""
    for name, data in contents["data"].items():
        if data["metrics"]:
            title = f"{name}: {data['examples']['test']} held-out examples"
            print_table(title, *_metrics_table(data, METRICS))
            if (weight := data["settings"]["kl_weight"]) != 1:
                print(f"  ({TITLES[BAYESIAN]}: KL weight {weight:g}, a tempered posterior)")
    if rows := _call_rows(contents["data"], ".1f"):
        title = "what a call costs: until it returns (dispatch), until its result is ready"
        headings = ["", "called by", "dispatch (us)", "ratio", "completion (us)", "ratio"]
        print_table(title, headings, rows)


def print_table(title: str, headings: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Prints a table as aligned text: numbers to the right, words to the left."""
    lines = [headings, *rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    print(f"\n{title}")
    for line in lines:
        columns = zip(line, widths, _are_numbers(rows), strict=True)
        cells = [text.rjust(size) if right else text.ljust(size) for text, size, right in columns]
        print("  " + "  ".join(cells).rstrip())


def _are_numbers(rows: Sequence[Sequence[str]]) -> list[bool]:
    """For each column, True if the column holds numbers."""
    return [all(text[:1] in "-0123456789" for text in column) for column in zip(*rows, strict=True)]


def _metrics_table(
    data: Mapping[str, Any], formats: Mapping[str, tuple[str, str]]
) -> tuple[list[str], list[list[str]]]:
    """Headings, and a row for each model."""
    metrics = data["metrics"]
    shown = [name for name in formats if any(name in each for each in metrics.values())]
    rows = [
        [title, *(number(metrics[model].get(name), formats[name][1]) for name in shown)]
        for model, title in TITLES.items()
        if model in metrics
    ]
    return ["", *(formats[name][0] for name in shown)], rows


def _call_rows(datasets: Mapping[str, Any], form: str) -> list[list[str]]:
    rows = []
    for name, data in datasets.items():
        for row, measured in data["dispatch"].items():
            for called, column in measured["columns"].items():
                rows.append([f"{name}, {row}", called])
                for kind in ("dispatch", "completion"):
                    rows[-1].append(number(column[f"{kind}_us"], form))
                    rows[-1].append(number(column[f"{kind}_ratio"]["median"], ".2f"))
    return rows


def number(value: float | None, form: str) -> str:
    """Formats a number; the empty string for None."""
    return "" if value is None else format(value, form)


# --- The page ---


_NOT_FINISHED = {
    "interrupted": "The run was interrupted. The page has the results up to then.",
    "diverged": "A training diverged. The page has the results of its last good state.",
}


def page_of(report: Mapping[str, Any]) -> str:
    """Renders the report as a self-contained HTML page.

    **Arguments:**

    - `report`: the contents of `results.json`.
    """
    sections = [_section(name, data) for name, data in report["data"].items()]
    machine = {"how it ended": report["stopped"], "seed": report["seed"]} | report["machine"]
    warnings = (f'<p class="warning">{html.escape(text)}</p>' for text in _warnings(report))
    parts = {
        "HEADLINE": html.escape(_headline(report)),
        "WARNINGS": "".join(warnings),
        "SECTIONS": "".join(sections) + _calls(report["data"]),
        "MACHINE": _definitions((name, str(value)) for name, value in machine.items()),
        "TITLES": _script_of(TITLES),
        "REPORT": _script_of(report),
    }
    # Replace all placeholders in one pass, because an inserted text may look like a placeholder.
    pieces = pathlib.Path(__file__).with_name("report.html").read_text("utf-8").split("@@")
    return "".join(parts.get(piece, piece) for piece in pieces)


def _headline(report: Mapping[str, Any]) -> str:
    machine = report["machine"]
    seconds = sum(data["seconds"] for data in report["data"].values())
    names = " and ".join(report["data"]) or "nothing yet"
    return (
        f"{names} in {seconds:.0f} s on {report['device']}, seed {report['seed']}; "
        f"eqxlike {machine['eqxlike']} with JAX {machine['jax']} on Python {machine['python']}, "
        f"{machine['date'].replace('T', ' ').replace('+00:00', ' UTC')}"
    )


def _warnings(report: Mapping[str, Any]) -> Iterator[str]:
    if report["quick"]:
        yield "A quick run: a look in seconds, with trainings too short to quote."
    if report["stopped"] in _NOT_FINISHED:
        yield _NOT_FINISHED[report["stopped"]]
    for name, data in report["data"].items():
        for model, training in data["trainings"].items():
            if training["stopped"] != "finished":
                yield f"{name}, {TITLES[model]}: {training['message']}"


def _section(name: str, data: Mapping[str, Any]) -> str:
    """The section of a data set: its table, explanations, pictures and settings."""
    examples, settings = data["examples"], data["settings"]
    said = (
        f"Trained on {examples['train']} examples. The table and the pictures are of the "
        f"{examples['test']} that were held out."
    )
    if data["seconds"]:
        said += f" All of it took {data['seconds']:.0f} s."
    headings, rows = _metrics_table(data, ON_PAGE)
    parts = [f"<h2>{html.escape(name.capitalize())}</h2>", f"<p>{html.escape(said)}</p>"]
    if rows:
        parts.append(_table(headings, rows))
    if settings["kl_weight"] != 1:
        note = f"{TITLES[BAYESIAN]}: KL weight {settings['kl_weight']:g}, a tempered posterior."
        parts.append(f'<p class="hint">{note}</p>')
    parts.append(f'<div class="pictures" data-of="{html.escape(name)}"></div>')
    what = _definitions(_what_was_run(data))
    parts.append(f"<details><summary>What was run</summary>{what}</details>")
    return f"<section>{''.join(parts)}</section>"


def _what_was_run(data: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for model, training in data["trainings"].items():
        said = f"{training['steps']} of {training['planned']} steps, {training['stopped']}."
        yield TITLES[model], said
    meanings = dict(
        re.findall(r"- `(\w+)`: (.*?)(?=\n\s*- `|\Z)", Settings.__doc__ or "", re.DOTALL)
    )
    for name, value in data["settings"].items():
        meaning = " ".join(meanings.get(name, "").replace("`", "").split())
        yield f"{name} = {value:g}", meaning[:1].upper() + meaning[1:]


def _calls(datasets: Mapping[str, Any]) -> str:
    rows = _call_rows(datasets, ",.1f")
    if not rows:
        return ""
    headings = ["", "called by", "dispatch (µs)", "ratio", "completion (µs)", "ratio"]
    return (
        "<section><h2>What a call costs</h2><p>The demo's own training step and a prediction, "
        f"called in three ways that compute the same.</p>{_table(headings, rows)}"
        '<div class="pictures" id="dispatch"></div></section>'
    )


def _table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Renders a table. Cells in columns that hold words have the class `name`."""
    kinds = ["" if right else ' class="name"' for right in _are_numbers(rows)]

    def line(texts: Sequence[str], tag: str) -> str:
        cells = zip(kinds, texts, strict=True)
        return "".join(f"<{tag}{kind}>{html.escape(text)}</{tag}>" for kind, text in cells)

    body = "".join(f"<tr>{line(texts, 'td')}</tr>" for texts in rows)
    head = f"<thead><tr>{line(headings, 'th')}</tr></thead>"
    return f'<div class="scroll"><table>{head}<tbody>{body}</tbody></table></div>'


def _definitions(pairs: Iterable[tuple[str, str]]) -> str:
    items = (f"<dt>{html.escape(name)}</dt><dd>{html.escape(said)}</dd>" for name, said in pairs)
    return f"<dl>{''.join(items)}</dl>"


def _script_of(value: Any) -> str:
    """JSON for a script element. `<` is escaped, because `</` or `<!--` could break the element."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
