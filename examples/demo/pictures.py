"""The demo's four pictures, as matplotlib Figures, without a window system or global state."""

import pathlib
from collections.abc import Mapping
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from .compare import BAYESIAN, FILTERED, FLAT, MODULE, PLAIN
from .evaluate import LEVEL, METHODS
from .report import TITLES, number

BLUE, ORANGE, GREEN, RED, GREY = "#2b6cb0", "#dd8a2b", "#3a9a5c", "#c53030", "#777777"
INK = "#333333"
COLOURS = {PLAIN: ORANGE, "ridge": GREEN, "logistic": GREEN}
"""The colours of some models. All other models are blue."""

COLUMN_COLOURS = {FLAT: "#b8c4d0", MODULE: "#7f95ab", FILTERED: BLUE}


def draw(results: Mapping[str, Any], folder: pathlib.Path) -> list[pathlib.Path]:
    """Draws each picture whose results are available.

    **Arguments:**

    - `results`: the results in the report, by name of the data set.
    - `folder`: the folder of the pictures.

    **Returns:** the files written.
    """
    drawn = {
        "diabetes_intervals.png": _draw_intervals(results),
        "digits_reliability.png": _draw_reliability(results),
        "elbo.png": _draw_elbo(results),
        "dispatch.png": _draw_dispatch(results),
    }
    for file, figure in drawn.items():
        if figure is not None:
            figure.savefig(folder / file, dpi=150)
    return [folder / file for file, figure in drawn.items() if figure is not None]


def _new_figure(
    title: str, width: float, height: float, columns: int, rows: int = 1, **shared: Any
) -> tuple[Figure, np.ndarray]:
    """A figure, and its axes as an array of shape `(rows, columns)`."""
    figure = Figure(figsize=(width, height), layout="constrained")
    figure.suptitle(title, fontsize=12, fontweight="bold")
    return figure, figure.subplots(rows, columns, squeeze=False, **shared)


def _finish(axes: Any, title: str, **settings: Any) -> None:
    axes.set_title(title, fontsize=10)
    axes.set(**settings)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25, linewidth=0.6)
    axes.set_axisbelow(True)


def _draw_intervals(results: Mapping[str, Any]) -> Figure | None:
    """Intervals and truth of held-out patients, ordered by prediction; one panel per model."""
    diabetes = results.get("diabetes", {"intervals": {}})
    names = [name for name in (BAYESIAN, PLAIN, *METHODS) if name in diabetes["intervals"]]
    if not names:
        return None
    title, count = "Diabetes: predictive intervals against truth", len(names)
    figure, (panels,) = _new_figure(title, 5.6 * count, 4.6, count, sharey=True)
    for axes, name in zip(panels, names, strict=True):
        predicted, metrics = diabetes["intervals"][name], diabetes["metrics"][name]
        fields = "mean", "lower", "upper", "truth"
        columns = np.array([predicted[field] for field in fields], float)
        mean, lower, upper, y = columns[:, np.argsort(columns[0])]
        place, is_inside = np.arange(len(y)), (lower <= y) & (y <= upper)
        colour, label = COLOURS.get(name, BLUE), f"{LEVEL:.0%} interval"
        axes.vlines(place, lower, upper, color=colour, alpha=0.3, linewidth=2, label=label)
        axes.plot(place, mean, color=colour, linewidth=1.8, label="predictive mean")
        for shown, marker, ink, size, label in (
            (is_inside, "o", INK, 3.2, "truth"),
            (~is_inside, "X", RED, 6, "truth outside interval"),
        ):
            axes.plot(place[shown], y[shown], marker, color=ink, ms=size, label=label)
        inside, rmse = number(metrics["coverage"], ".1%"), number(metrics["rmse"], ".1f")
        title = f"{TITLES[name]}: {inside} inside, RMSE {rmse}"
        _finish(axes, title, xlabel="held-out patients, ordered by predictive mean")
    panels[0].set_ylabel("disease progression after one year (score)")
    panels[0].legend(loc="upper left", fontsize=8, framealpha=0.9)
    return figure


def _draw_reliability(results: Mapping[str, Any]) -> Figure | None:
    """Plots accuracy against confidence, and below it the number of predictions, for each model."""
    digits = results.get("digits", {"metrics": {}})
    if not digits["metrics"]:
        return None
    title, columns = "Digits: is a prediction right as often as it claims?", len(digits["metrics"])
    shared: Any = {"sharex": True, "sharey": "row", "height_ratios": [3.2, 1]}
    figure, panels = _new_figure(title, 1.2 + 3.5 * columns, 5.3, columns, rows=2, **shared)
    for axes, counts, (name, metrics) in zip(*panels, digits["metrics"].items(), strict=True):
        edges, count, confidence, accuracy = (
            np.array(digits["reliability"][name][field], float)
            for field in ("edges", "count", "confidence", "accuracy")
        )
        colour, width, few = COLOURS.get(name, BLUE), edges[1] - edges[0], 5
        filled = np.flatnonzero(count)
        for place in filled:
            style = {"width": width, "align": "edge", "color": colour, "edgecolor": "white"}
            # Bars of few predictions are fainter.
            alpha, middle = 0.35 if count[place] >= few else 0.12, edges[place] + width / 2
            axes.bar(edges[place], accuracy[place], alpha=alpha, **style)
            counts.bar(edges[place], count[place], alpha=0.7, **style)
            counts.text(middle, 1.25 * count[place], f"{count[place]:.0f}", ha="center", fontsize=7)
        points: Any = {"fmt": "o", "markersize": 5, "elinewidth": 1.2, "capsize": 2.5}
        points |= {"color": colour, "clip_on": False, "zorder": 3}
        axes.plot([0, 1], [0, 1], color=GREY, linestyle="--", linewidth=1, label="as claimed")
        x, y, around = confidence[filled], accuracy[filled], _around(accuracy, count)[:, filled]
        axes.errorbar(x, y, yerr=around, label=f"accuracy, {LEVEL:.0%} interval", **points)
        ece, nll = number(metrics["ece"], ".3f"), number(metrics["nll"], ".3f")
        _finish(axes, f"{TITLES[name]}\nECE {ece}, NLL {nll} nats", xlim=(0, 1), ylim=(0, 1))
        _finish(counts, "", xlabel="confidence (predicted probability)")
    axes, counts = panels[0, 0], panels[1, 0]
    axes.set_xticks([0, 0.25, 0.5, 0.75, 1], ["0", "0.25", "0.5", "0.75", "1"])
    axes.set_ylabel("accuracy in the bin")
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=2)
    most = 4 * digits["examples"]["test"]
    counts.set(yscale="log", ylim=(0.7, most), ylabel="predictions")
    return figure


def _around(fraction: np.ndarray, count: np.ndarray) -> np.ndarray:
    """Distances from a fraction of `count` to the ends of its 90% interval (Wilson, 1927)."""
    z, count = 1.645, np.maximum(count, 1)
    middle = (fraction + z**2 / (2 * count)) / (1 + z**2 / count)
    spread = np.sqrt(fraction * (1 - fraction) / count + z**2 / (4 * count**2))
    half = z / (1 + z**2 / count) * spread
    return np.maximum([fraction - middle + half, middle + half - fraction], 0)


def _draw_elbo(results: Mapping[str, Any]) -> Figure | None:
    """The ELBO of each step, and its running mean."""
    shown = {name: data for name, data in results.items() if data["elbo"]}
    if not shown:
        return None
    title, count = "The evidence lower bound (ELBO) over training", len(shown)
    figure, (panels,) = _new_figure(title, 5.6 * count, 4.2, count)
    for axes, (name, data) in zip(panels, shown.items(), strict=True):
        elbo = np.array(data["elbo"], float)
        steps, window = np.arange(1, len(elbo) + 1), max(1, len(elbo) // 50)
        running = np.convolve(elbo, np.ones(window) / window, mode="valid")
        axes.plot(steps, elbo, color=BLUE, alpha=0.25, linewidth=0.7, label="minibatch estimate")
        label = f"mean of {window} steps"
        axes.plot(steps[window - 1 :], running, color=BLUE, linewidth=1.8, label=label)
        # The first steps are far below the rest, and would flatten the curve.
        low, high = np.quantile(elbo, 0.1), elbo.max()
        if high > low:
            axes.set_ylim(low - 0.5 * (high - low), high + 0.1 * (high - low))
        weight, title, bound = data["settings"]["kl_weight"], name, "ELBO"
        if weight != 1:
            title, bound = f"{name}, tempered: KL weight {weight:g}", "tempered ELBO"
        _finish(axes, title, xlabel="training step", ylabel=f"{bound} (nats per example)")
        axes.legend(loc="lower right", fontsize=8)
    return figure


def _draw_dispatch(results: Mapping[str, Any]) -> Figure | None:
    """The cost of a call relative to `jax.jit` on the module; one panel for each of the two times.

    Absolute times differ a hundredfold between rows and vary on a shared machine, so they are only
    written next to the bars.
    """
    rows = {
        f"{name}\n{row}": measured["columns"]
        for name, data in results.items()
        for row, measured in data["dispatch"].items()
    }
    if not rows:
        return None
    title, height = "What a call costs in the demo", 1.9 + 0.9 * len(rows)
    figure, (panels,) = _new_figure(title, 11.2, height, columns=2, sharey=True)
    whiskers = {"elinewidth": 0.8, "capsize": 1.5, "ecolor": INK}
    box = {"facecolor": "white", "edgecolor": "none", "pad": 1, "alpha": 0.8}
    style = {"ha": "right", "va": "center", "fontsize": 8, "family": "monospace", "bbox": box}
    until = {"dispatch": "until the call returns", "completion": "until the result is ready"}
    for axes, (kind, title) in zip(panels, until.items(), strict=True):
        columns = [column for row in rows.values() for column in row.values()]
        # Far quartiles, caused by other load on the machine, are clipped at the edge.
        most = 1.6 * max(column[f"{kind}_ratio"]["median"] for column in columns)
        for place, name in enumerate(COLUMN_COLOURS):
            found = [row[name] for row in rows.values()]
            y = np.arange(len(rows)) + 0.27 * (place - 1)
            ratios = np.array([[*column[f"{kind}_ratio"].values()] for column in found])
            lower, median, upper = ratios.T
            look: Any = {"color": COLUMN_COLOURS[name], "label": name, "error_kw": whiskers}
            axes.barh(y, median, 0.25, xerr=(median - lower, upper - median), **look)
            for at, ratio, column in zip(y, median, found, strict=True):
                text = f"{ratio:.2f} {column[f'{kind}_us']:>6,.0f} \N{MICRO SIGN}s"
                axes.text(0.99 * most, at, text, **style)
        axes.axvline(1, color=GREY, linestyle="--", linewidth=1)
        axes.set_yticks(range(len(rows)), list(rows))
        label = f"ratio to {MODULE}: median and quartiles of the rounds"
        _finish(axes, f"{kind}: {title}", xlim=(0, most), xlabel=label)
        axes.grid(axis="y", visible=False)
    panels[0].invert_yaxis()
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
    return figure
