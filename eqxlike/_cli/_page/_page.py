"""The demo's report as one page of HTML: tables here, pictures by the script of the template."""

import html
import json
import pathlib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from .._compare import BAYESIAN, METRICS, PLAIN, TITLES
from .._evaluate import LEVEL
from .._methods import METHODS
from .._models import Settings

_TEMPLATE = pathlib.Path(__file__).with_name("template.html")

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
    "ratio": "The time beside that of jax.jit on the module in the same round: the median of the "
    "rounds, and their quartiles. Ratios hold on a machine that does other work too; microseconds "
    "do not.",
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
    parts = {
        "HEADLINE": html.escape(_headline(report)),
        "WARNINGS": "".join(f'<p class="warning">{html.escape(x)}</p>' for x in _warnings(report)),
        "SECTIONS": "".join(sections) + _dispatch(report["data"]),
        "MACHINE": _definitions((name, str(value)) for name, value in _machine(report)),
        "TITLES": _script({name: _title(name) for name in _models(report["data"])}),
        "REPORT": _script(report),
    }
    # In one go: what is put in may look like a mark.
    pieces = _TEMPLATE.read_text(encoding="utf-8").split("@@")
    return "".join(parts.get(piece, piece) for piece in pieces)


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
    examples, settings, metrics = data["examples"], data["settings"], data["metrics"]
    said = (
        f"Trained on {examples['train']} examples. The table and the pictures are of the "
        f"{examples['test']} that were held out."
    )
    if data["seconds"]:
        said += f" All of it took {_duration(data['seconds'])}."
    shown = [metric for metric in _FORMATS if any(metric in each for each in metrics.values())]
    rows = [
        [
            _title(model),
            *(_number(metrics[model].get(metric), _FORMATS[metric][1]) for metric in shown),
        ]
        for model in _models({name: data})
    ]
    parts = [f"<h2>{html.escape(name.capitalize())}</h2>", f"<p>{html.escape(said)}</p>"]
    if rows:
        parts.append(_table(["", *(_FORMATS[metric][0] for metric in shown)], rows))
    if settings["kl_weight"] != 1:
        note = f"{_title(BAYESIAN)}: KL weight {settings['kl_weight']:g}, a tempered posterior."
        parts.append(f'<p class="hint">{html.escape(note)}</p>')
    if shown:
        meanings = ((_FORMATS[metric][0], _MEANINGS[metric]) for metric in shown)
        parts.append(_folded("What the numbers mean", meanings, is_open=True))
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
    rows = [
        [
            f"{name}, {row}",
            called,
            *(
                text
                for kind in ("dispatch", "completion")
                for text in (
                    _number(column[f"{kind}_us"], ",.1f"),
                    _number(column[f"{kind}_ratio"]["median"], ".2f"),
                )
            ),
        ]
        for name, data in datasets.items()
        for row, measured in data["dispatch"].items()
        for called, column in measured["columns"].items()
    ]
    if not rows:
        return ""
    headings = ["", "called by", "dispatch (µs)", "ratio", "completion (µs)", "ratio"]
    return (
        "<section><h2>What a call costs</h2><p>The demo's own training step and a prediction, "
        f"called in three ways that compute the same.</p>{_table(headings, rows, names=2)}"
        f"{_folded('What the numbers mean', _DISPATCH.items(), is_open=True)}"
        '<div class="pictures" id="dispatch"></div></section>'
    )


def _machine(report: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    yield "how it ended", report["stopped"]
    yield "seed", report["seed"]
    yield from report["machine"].items()


def _models(datasets: Mapping[str, Any]) -> list[str]:
    """The models that were evaluated, the two networks first, then the baselines, then the rest."""
    found = {model for data in datasets.values() for model in data["metrics"]}
    order = (BAYESIAN, PLAIN, "ridge", "logistic", *METHODS)
    return [*(model for model in order if model in found), *sorted(found.difference(order))]


def _title(model: str) -> str:
    return TITLES.get(model, model)


def _number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def _table(headings: Sequence[str], rows: Sequence[Sequence[str]], names: int = 1) -> str:
    """A table; the first `names` columns are words, the others numbers."""

    def row(cells: Iterable[str], tag: str) -> str:
        kinds = (' class="name"' if place < names else "" for place in range(len(headings)))
        return "".join(
            f"<{tag}{kind}>{html.escape(cell)}</{tag}>"
            for kind, cell in zip(kinds, cells, strict=True)
        )

    body = "".join(f"<tr>{row(cells, 'td')}</tr>" for cells in rows)
    return (
        f'<div class="scroll"><table><thead><tr>{row(headings, "th")}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )


def _folded(title: str, pairs: Iterable[tuple[str, str]], *, is_open: bool = False) -> str:
    opened = ' open=""' if is_open else ""
    return (
        f"<details{opened}><summary>{html.escape(title)}</summary>{_definitions(pairs)}</details>"
    )


def _definitions(pairs: Iterable[tuple[str, str]]) -> str:
    items = (f"<dt>{html.escape(name)}</dt><dd>{html.escape(said)}</dd>" for name, said in pairs)
    return f"<dl>{''.join(items)}</dl>"


def _script(value: Any) -> str:
    """JSON for the inside of a script, where `</` and `<!--` would end it or hide its end."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
