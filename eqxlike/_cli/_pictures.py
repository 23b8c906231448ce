"""The demo's four pictures, as matplotlib Figures: no window system, no global state."""

import pathlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from .._tables import BLUE, GREEN, GREY, INK, ORANGE, RED, new_figure, tidy
from ..bayes.plot._calibration import draw_reliability
from ._compare import BAYESIAN, FILTERED, FLAT, MODULE, PLAIN, Output
from ._evaluate import LEVEL, METHODS, Intervals, Probabilities
from ._report import TITLES

COLOURS = dict.fromkeys(METHODS, BLUE) | {
    BAYESIAN: BLUE,
    PLAIN: ORANGE,
    "ridge": GREEN,
    "logistic": GREEN,
}
COLUMN_COLOURS = {FLAT: "#b8c4d0", MODULE: "#7f95ab", FILTERED: BLUE}
DPI = 150


def draw(outputs: Mapping[str, Output], folder: pathlib.Path) -> list[pathlib.Path]:
    """Draws whatever there are numbers for.

    **Arguments:**

    - `outputs`: the outputs, by name of the data set.
    - `folder`: the folder of the pictures.

    **Returns:** the files written.
    """
    written = []
    for file, draw_figure in (
        ("diabetes_intervals.png", _draw_intervals),
        ("digits_reliability.png", _draw_reliability),
        ("elbo.png", _draw_elbo),
        ("dispatch.png", _draw_dispatch),
    ):
        figure = draw_figure(outputs)
        if figure is not None:
            figure.savefig(folder / file, dpi=DPI)
            written.append(folder / file)
    return written


def _new_figure(width: float, height: float, title: str) -> Any:
    figure = new_figure(width, height, "The demo's pictures")
    figure.suptitle(title, fontsize=12, fontweight="bold")
    return figure


def _finish(axes: Any, title: str, **settings: Any) -> None:
    axes.set_title(title, fontsize=10)
    axes.set(**settings)
    tidy(axes)


def _draw_intervals(outputs: Mapping[str, Output]) -> Any:
    """Each held-out patient's interval with the truth, ordered by prediction, a panel a model."""
    if "diabetes" not in outputs or not outputs["diabetes"].evaluations:
        return None
    output = outputs["diabetes"]
    names = [name for name in (BAYESIAN, PLAIN, *METHODS) if name in output.evaluations]
    figure = _new_figure(5.6 * len(names), 4.6, "Diabetes: predictive intervals against truth")
    panels = figure.subplots(1, len(names), sharey=True, squeeze=False)[0]
    for axes, name in zip(panels, names, strict=True):
        predicted = output.evaluations[name]
        assert isinstance(predicted, Intervals)
        order = np.argsort(predicted.mean)
        place = np.arange(len(order))
        of_patients = predicted.mean, predicted.lower, predicted.upper, predicted.truth
        mean, lower, upper, y = (values[order] for values in of_patients)
        is_inside = (lower <= y) & (y <= upper)
        colour, interval = COLOURS[name], f"{LEVEL:.0%} interval"
        axes.vlines(place, lower, upper, color=colour, alpha=0.3, linewidth=2, label=interval)
        axes.plot(place, mean, color=colour, linewidth=1.8, label="predictive mean")
        for shown, marker, ink, size, label in (
            (is_inside, "o", INK, 3.2, "truth"),
            (~is_inside, "X", RED, 6, "truth outside interval"),
        ):
            axes.plot(place[shown], y[shown], marker, color=ink, ms=size, label=label)
        metrics = predicted.metrics
        title = f"{TITLES[name]}: {metrics['coverage']:.1%} inside, RMSE {metrics['rmse']:.1f}"
        _finish(axes, title, xlabel="held-out patients, ordered by predictive mean")
    panels[0].set_ylabel("disease progression after one year (score)")
    panels[0].legend(loc="upper left", fontsize=8, framealpha=0.9)
    return figure


def _draw_reliability(outputs: Mapping[str, Output]) -> Any:
    """Accuracy over confidence, and below it the number of predictions, a panel a model."""
    if "digits" not in outputs or not outputs["digits"].evaluations:
        return None
    evaluations = outputs["digits"].evaluations
    figure = _new_figure(
        1.2 + 3.5 * len(evaluations), 5.3, "Digits: is a prediction right as often as it claims?"
    )
    panels = figure.subplots(
        2, len(evaluations), sharex=True, sharey="row", squeeze=False, height_ratios=[3.2, 1]
    )
    for axes, counts, (name, predicted) in zip(*panels, evaluations.items(), strict=True):
        assert isinstance(predicted, Probabilities)
        edges, colour = predicted.bins["edges"], COLOURS[name]
        draw_reliability(axes, **predicted.bins, colour=colour)
        is_filled = predicted.bins["count"] > 0
        count, left = predicted.bins["count"][is_filled], edges[:-1][is_filled]
        width = edges[1] - edges[0]
        counts.bar(left, count, width, align="edge", color=colour, alpha=0.7, edgecolor="white")
        for place, number in zip(left, count, strict=True):
            counts.text(place + width / 2, number * 1.25, str(number), ha="center", fontsize=7)
        metrics = predicted.metrics
        axes.set_title(
            f"{TITLES[name]}\nECE {metrics['ece']:.3f}, NLL {metrics['nll']:.3f} nats", fontsize=10
        )
        _finish(counts, "", xlabel="confidence (predicted probability)")
    axes, counts = panels[0, 0], panels[1, 0]
    axes.set_ylabel("accuracy in the bin")
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=2)
    most = 4 * len(outputs["digits"].data.test)
    counts.set(yscale="log", ylim=(0.7, most), ylabel="predictions")
    return figure


def _draw_elbo(outputs: Mapping[str, Output]) -> Any:
    """The ELBO of each step, and its running mean."""
    shown = {
        name: np.array(output.bayesian.result.history)
        for name, output in outputs.items()
        if output.bayesian.result.history
    }
    if not shown:
        return None
    figure = _new_figure(5.6 * len(shown), 4.2, "The evidence lower bound (ELBO) over training")
    panels = figure.subplots(1, len(shown), squeeze=False)[0]
    for axes, (name, losses) in zip(panels, shown.items(), strict=True):
        elbo, steps = -losses, np.arange(1, len(losses) + 1)
        window = max(1, len(elbo) // 50)
        running = np.convolve(elbo, np.ones(window) / window, mode="valid")
        axes.plot(steps, elbo, color=BLUE, alpha=0.25, linewidth=0.7, label="minibatch estimate")
        label = f"mean of {window} steps"
        axes.plot(steps[window - 1 :], running, color=BLUE, linewidth=1.8, label=label)
        # The first steps lie far below the rest and would flatten it.
        low, high = np.quantile(elbo, 0.1), elbo.max()
        if high > low:
            axes.set_ylim(low - 0.5 * (high - low), high + 0.1 * (high - low))
        weight, title, bound = outputs[name].settings.kl_weight, name, "ELBO"
        if weight != 1:
            title, bound = f"{name}, tempered: KL weight {weight:g}", "tempered ELBO"
        _finish(axes, title, xlabel="training step", ylabel=f"{bound} (nats per example)")
        axes.legend(loc="lower right", fontsize=8)
    return figure


_BESIDE_BARS = {
    "ha": "right",
    "va": "center",
    "fontsize": 8,
    "family": "monospace",
    "bbox": {"facecolor": "white", "edgecolor": "none", "pad": 1, "alpha": 0.8},
}


def _draw_dispatch(outputs: Mapping[str, Output]) -> Any:
    """The cost of a call as a ratio to `jax.jit` on the module; one panel each for the two times.

    Times differ a hundredfold between rows and mean little on a shared machine; they are written
    next to the bars.
    """
    rows = {
        f"{name}\n{row}": measured
        for name, output in outputs.items()
        for row, measured in output.dispatch.items()
    }
    if not rows:
        return None
    figure = _new_figure(11.2, 1.9 + 0.9 * len(rows), "What a call costs in the demo")
    panels = figure.subplots(1, 2, sharey=True)
    height = 0.27
    for axes, kind, title in (
        (panels[0], "dispatch", "dispatch: until the call returns"),
        (panels[1], "completion", "completion: until the result is ready"),
    ):
        cells = {
            column: [
                getattr(measured.columns[column], f"{kind}_ratio") for measured in rows.values()
            ]
            for column in COLUMN_COLOURS
        }
        # Quartiles that the machine's other work threw far out are cut off at the edge.
        most = 1.6 * max(ratio.median for column in cells.values() for ratio in column)
        for index, (column, ratios) in enumerate(cells.items()):
            places = np.arange(len(rows)) + (index - 1) * height
            medians = np.array([ratio.median for ratio in ratios])
            quartiles = np.array([[ratio.lower, ratio.upper] for ratio in ratios]).T
            whiskers = {"elinewidth": 0.8, "capsize": 1.5, "ecolor": INK}
            style = {"color": COLUMN_COLOURS[column], "label": column, "error_kw": whiskers}
            axes.barh(places, medians, height * 0.92, xerr=abs(quartiles - medians), **style)
            for place, median, measured in zip(places, medians, rows.values(), strict=True):
                time_us = getattr(measured.columns[column], f"{kind}_us")
                text = f"{median:.2f} {time_us:>6,.0f} \N{MICRO SIGN}s"
                axes.text(0.99 * most, place, text, **_BESIDE_BARS)
        axes.axvline(1, color=GREY, linestyle="--", linewidth=1)
        axes.set_yticks(range(len(rows)), list(rows))
        label = f"ratio to {MODULE}: median and quartiles of the rounds"
        _finish(axes, title, xlim=(0, most), xlabel=label)
        axes.grid(axis="y", visible=False)
    panels[0].invert_yaxis()
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
    return figure
