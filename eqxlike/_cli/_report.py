"""The report of a run of the demo: tables to print, JSON, and one page of HTML.

The page has its tables from here, and its pictures from the script of the template.
"""

import argparse
import dataclasses
import html
import json
import math
import os
import pathlib
import re
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from .._tables import align, html_table, html_warnings, page_from, script_of
from .._timing import Column, installed_version, machine_info
from .._version import __version__
from ._compare import BAYESIAN, PLAIN, Output
from ._evaluate import LEVEL, METHODS, Intervals
from ._models import Settings

PACKAGES = ("matplotlib", "optax", "scikit-learn")
PREDICTED = ("truth", "mean", "lower", "upper")


def report(
    outputs: Mapping[str, Output], *, stopped: str, seed: int, is_quick: bool, device: str
) -> dict[str, Any]:
    """The whole report, of plain values.

    **Arguments:**

    - `outputs`: the outputs, by name of the data set.
    - `stopped`: "finished", "interrupted" or "diverged".
    - `seed`: the seed of the run.
    - `is_quick`: whether the run was shortened.
    - `device`: the device on which it ran, in words.
    """
    versions = {name: installed_version(name) for name in PACKAGES}
    return {
        "stopped": stopped,
        "seed": seed,
        "quick": is_quick,
        "device": device,
        "machine": machine_info() | versions | {"eqxlike": __version__},
        "data": {name: _output(output) for name, output in outputs.items()},
    }


def _output(output: Output) -> dict[str, Any]:
    data, evaluations = output.data, output.evaluations
    return {
        "examples": {"train": len(data.train), "test": len(data.test)},
        "settings": dataclasses.asdict(output.settings),
        "trainings": {
            name: {
                "steps": len(each.result.history),
                "planned": each.planned,
                "stopped": each.result.stopped,
                "message": each.result.message,
            }
            for name, each in output.trainings.items()
        },
        "metrics": {name: each.metrics for name, each in evaluations.items()},
        "reliability": {
            name: {field: values.tolist() for field, values in each.bins.items()}
            for name, each in evaluations.items()
            if not isinstance(each, Intervals)
        },
        "intervals": {
            name: {field: getattr(each, field).tolist() for field in PREDICTED}
            for name, each in evaluations.items()
            if isinstance(each, Intervals)
        },
        "elbo": [-loss for loss in output.bayesian.result.history],
        "dispatch": {
            name: {
                "baseline": each.baseline,
                "columns": {called: _column(column) for called, column in each.columns.items()},
            }
            for name, each in output.dispatch.items()
        },
        "seconds": output.seconds,
    }


def _column(column: Column) -> dict[str, Any]:
    numbers = dataclasses.asdict(column)
    del numbers["name"], numbers["samples"]
    return numbers | {"rounds": len(column.samples.dispatch_us), "calls": column.samples.calls}


def write(contents: Mapping[str, Any], folder: pathlib.Path) -> list[pathlib.Path]:
    """Writes a report as a page and as JSON: rounded to six digits, None for what is NaN or
    infinite.

    **Returns:** the files.
    """
    contents = _plain(contents)
    page, results = folder / "report.html", folder / "results.json"
    results.write_text(json.dumps(contents, indent=1, allow_nan=False) + "\n")
    page.write_text(page_of(contents), encoding="utf-8")
    return [page, results]


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    return value


class CommandError(Exception):
    """The command cannot do what it was asked; its message is one line for the person who asked."""


def add_folder(parser: argparse.ArgumentParser, default: str, what: str) -> None:
    """Adds the option `--out`: where what a command writes goes."""
    path = pathlib.Path(default)
    parser.add_argument(
        "--out", type=pathlib.Path, default=path, metavar="DIR", help=f"{what} ({default})"
    )


def writable_folder(path: pathlib.Path) -> pathlib.Path:
    """Makes a folder where there is none, and makes sure that files can be written there.

    **Raises:** `CommandError` if files cannot be written there.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
        handle, probe = tempfile.mkstemp(dir=path)
        os.close(handle)
        os.unlink(probe)
    except OSError as error:
        reason = error.strerror or error
        raise CommandError(f"argument --out: cannot write to {str(path)!r}: {reason}") from None
    return path


# --- Tables ---


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


def print_tables(contents: Mapping[str, Any]) -> None:
    """Prints the models side by side on the test part, and what calls cost."""
    for name, data in contents["data"].items():
        if data["metrics"]:
            title = f"{name}: {data['examples']['test']} held-out examples"
            print("\n" + plain_table(title, *_metrics_table(data, METRICS)))
            if (weight := data["settings"]["kl_weight"]) != 1:
                print(f"  ({TITLES[BAYESIAN]}: KL weight {weight:g}, a tempered posterior)")
    if rows := _dispatch_rows(contents["data"], ".1f"):
        title = "what a call costs: until it returns (dispatch), until its result is ready"
        headings = ["", "called by", "dispatch (us)", "ratio", "completion (us)", "ratio"]
        print("\n" + plain_table(title, headings, rows))


def plain_table(title: str, headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table as aligned text.

    >>> print(plain_table("two", ["", "RMSE"], [["a", "1.5"], ["long", "12.5"]]))
    two
            RMSE
      a      1.5
      long  12.5
    """
    return "\n  ".join([title, *align(headings, rows).splitlines()])


def _metrics_table(
    data: Mapping[str, Any], formats: Mapping[str, tuple[str, str]]
) -> tuple[list[str], list[list[str]]]:
    """Headings, and a row for each model."""
    metrics = data["metrics"]
    shown = [name for name in formats if any(name in each for each in metrics.values())]
    rows = [
        [_title(model), *(_number(metrics[model].get(name), formats[name][1]) for name in shown)]
        for model in _models([data])
    ]
    return ["", *(formats[name][0] for name in shown)], rows


def _dispatch_rows(datasets: Mapping[str, Any], form: str) -> list[list[str]]:
    return [
        [
            f"{name}, {row}",
            called,
            *(
                text
                for kind in ("dispatch", "completion")
                for text in (
                    _number(column[f"{kind}_us"], form),
                    _number(column[f"{kind}_ratio"]["median"], ".2f"),
                )
            ),
        ]
        for name, data in datasets.items()
        for row, measured in data["dispatch"].items()
        for called, column in measured["columns"].items()
    ]


def _models(datasets: Iterable[Mapping[str, Any]]) -> list[str]:
    """The models that were evaluated, the two networks first, then the baselines, then the rest."""
    found = {model for data in datasets for model in data["metrics"]}
    order = (BAYESIAN, PLAIN, "ridge", "logistic", *METHODS)
    return [*(model for model in order if model in found), *sorted(found.difference(order))]


def _title(model: str) -> str:
    return TITLES.get(model, model)


def _number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


# --- The page ---


_TEMPLATE = pathlib.Path(__file__).with_name("_report.html")

_FORMATS = METRICS | {"noise": ("noise", ".1f")}

_MEANINGS = {
    "rmse": "Root mean squared error of the predictive mean, in the units of the target. Less is "
    "better.",
    "accuracy": "Share of the held-out examples whose most probable class is the right one.",
    "nll": "Negative log likelihood: how much the truth surprises the model, in nats for an "
    "example. Less is better. It asks for being right and for being as sure as one may be.",
    "coverage": f"Share of the truths that lie inside the model's {LEVEL:.0%} intervals. It should "
    f"be near {LEVEL:.0%}: less is too sure, more is too careful.",
    "width": "Mean width of these intervals, in the units of the target. Of two models that cover "
    "as much, the one with narrower intervals knows more.",
    "noise": "Mean standard deviation of the noise that the model takes the target to have: what "
    "it does not hope to predict.",
    "ece": "Expected calibration error: how far confidence and accuracy are apart, in the mean "
    "over the predictions. At 0 a model is right as often as it claims.",
    "seconds": "Seconds that the method took to find the posterior and to predict.",
}
"""What each metric means, by name."""

_DISPATCH = {
    "dispatch": "Microseconds until the call returns. The device may still be computing.",
    "completion": "Microseconds until the result is ready.",
    "ratio": "The time relative to that of jax.jit on the module in the same round: the median of "
    "the rounds, and their quartiles. Ratios hold on a machine that does other work too; "
    "microseconds do not.",
    "jax.jit, flat list": "The floor: jax.jit called with a list of the arrays.",
    "jax.jit, module": "The baseline: jax.jit called with the module, its arrays split off "
    "outside.",
    "filter_jit": "eqxlike.filter_jit called with the module as it is.",
}

_NOT_FINISHED = {
    "interrupted": "The run was interrupted. What is shown is what was reached.",
    "diverged": "A training diverged. What is shown is its last good state.",
}


def page_of(report: Mapping[str, Any]) -> str:
    """The page; nothing in it is fetched from elsewhere.

    **Arguments:**

    - `report`: what `_report.report` returns, or a `results.json` that was read.
    """
    sections = [_section(name, data) for name, data in report["data"].items()]
    machine = {"how it ended": report["stopped"], "seed": report["seed"]} | report["machine"]
    parts = {
        "HEADLINE": html.escape(_headline(report)),
        "WARNINGS": html_warnings(_warnings(report)),
        "SECTIONS": "".join(sections) + _dispatch(report["data"]),
        "MACHINE": _definitions((name, str(value)) for name, value in machine.items()),
        "TITLES": script_of({name: _title(name) for name in _models(report["data"].values())}),
        "REPORT": script_of(report),
    }
    return page_from(_TEMPLATE, parts)


def _headline(report: Mapping[str, Any]) -> str:
    machine = report["machine"]
    seconds = sum(data["seconds"] for data in report["data"].values())
    names = " and ".join(report["data"]) or "nothing yet"
    return (
        f"{names} in {_duration(seconds)} on {report['device']}, seed {report['seed']}; "
        f"eqxlike {machine['eqxlike']} with JAX {machine['jax']} on Python {machine['python']}, "
        f"{machine['date'].replace('T', ' ').replace('+00:00', ' UTC')}"
    )


def _duration(seconds: float) -> str:
    """Seconds in words.

    >>> _duration(4.21), _duration(140.2)
    ('4.2 s', '2 min 20 s')
    """
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes else f"{seconds:.1f} s"


def _warnings(report: Mapping[str, Any]) -> Iterator[str]:
    if report["quick"]:
        yield "A quick run: a look in seconds, with trainings too short to quote."
    if report["stopped"] in _NOT_FINISHED:
        yield _NOT_FINISHED[report["stopped"]]
    for name, data in report["data"].items():
        for model, training in data["trainings"].items():
            if training["stopped"] != "finished":
                yield f"{name}, {_title(model)}: {training['message']}"


def _section(name: str, data: Mapping[str, Any]) -> str:
    """A data set: its table, what the numbers mean, its pictures, its settings."""
    examples, settings = data["examples"], data["settings"]
    said = (
        f"Trained on {examples['train']} examples. The table and the pictures are of the "
        f"{examples['test']} that were held out."
    )
    if data["seconds"]:
        said += f" All of it took {_duration(data['seconds'])}."
    headings, rows = _metrics_table(data, _FORMATS)
    parts = [f"<h2>{html.escape(name.capitalize())}</h2>", f"<p>{html.escape(said)}</p>"]
    if rows:
        parts.append(html_table(headings, rows))
    if settings["kl_weight"] != 1:
        note = f"{_title(BAYESIAN)}: KL weight {settings['kl_weight']:g}, a tempered posterior."
        parts.append(f'<p class="hint">{html.escape(note)}</p>')
    if len(headings) > 1:
        meanings = {heading: _MEANINGS[name] for name, (heading, _) in _FORMATS.items()}
        said_of = ((heading, meanings[heading]) for heading in headings[1:])
        parts.append(_folded("What the numbers mean", said_of, is_open=True))
    parts.append(f'<div class="pictures" data-of="{html.escape(name)}"></div>')
    parts.append(_folded("What was run", _what_was_run(data)))
    return f"<section>{''.join(parts)}</section>"


def _what_was_run(data: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for model, training in data["trainings"].items():
        said = f"{training['steps']} of {training['planned']} steps, {training['stopped']}."
        yield _title(model), said
    meanings = dict(
        re.findall(r"- `(\w+)`: (.*?)(?=\n\s*- `|\Z)", Settings.__doc__ or "", re.DOTALL)
    )
    for name, value in data["settings"].items():
        meaning = " ".join(meanings.get(name, "").replace("`", "").split())
        yield f"{name} = {value:g}", meaning[:1].upper() + meaning[1:]


def _dispatch(datasets: Mapping[str, Any]) -> str:
    rows = _dispatch_rows(datasets, ",.1f")
    if not rows:
        return ""
    headings = ["", "called by", "dispatch (µs)", "ratio", "completion (µs)", "ratio"]
    return (
        "<section><h2>What a call costs</h2><p>The demo's own training step and a prediction, "
        f"called in three ways that compute the same.</p>{html_table(headings, rows)}"
        f"{_folded('What the numbers mean', _DISPATCH.items(), is_open=True)}"
        '<div class="pictures" id="dispatch"></div></section>'
    )


def _folded(title: str, pairs: Iterable[tuple[str, str]], *, is_open: bool = False) -> str:
    opened = ' open=""' if is_open else ""
    return (
        f"<details{opened}><summary>{html.escape(title)}</summary>{_definitions(pairs)}</details>"
    )


def _definitions(pairs: Iterable[tuple[str, str]]) -> str:
    items = (f"<dt>{html.escape(name)}</dt><dd>{html.escape(said)}</dd>" for name, said in pairs)
    return f"<dl>{''.join(items)}</dl>"
