"""Figures in the text of a page equal the figures of the committed runs."""

import functools
import json
import pathlib
import re
from collections.abc import Iterable, Mapping
from typing import Any

import pytest

from benchmarks import exactness, table
from docs.site import chart

ROOT = pathlib.Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
EQUINOX, NNX = "Equinox filter_jit", "nnx.jit"


@functools.cache
def _rows(benchmark: str, jax: str = "0.10.2", device: str = "cpu") -> list[dict[str, Any]]:
    return json.loads((RESULTS / f"{benchmark}-{device}-jax-{jax}.json").read_text())["rows"]


def _row(benchmark: str, name: str, title: str | None = None) -> dict[str, Any]:
    rows = (row for row in _rows(benchmark) if row.get("table") == title)
    return next(row["columns"] for row in rows if row["name"] == name)


def _ratios(columns: Iterable[Mapping[str, Any]], name: str) -> list[float]:
    return [each[name]["completion_ratio"]["median"] for each in columns]


def _of_calls(name: str) -> list[float]:
    return _ratios((row["columns"] for row in _rows("jit_overhead")), name)


def _of_chart(name: str, digits: int = 2) -> str:
    return _range(_ratios((_row("jit_overhead", row) for row in chart.ROWS), name), digits)


def _of_layers(title: str, jax: str = "0.10.2") -> str:
    rows = (row for row in _rows("layers", jax) if row["table"].startswith(title))
    return _range(_ratios((row["columns"] for row in rows), "eqxlike"))


# The time of reverse mode as a multiple of the time of the value, in ascending order.
REVERSE = sorted(
    mode["ratio"] for row in _rows("ad-modes") for mode in row["modes"] if mode["mode"] == "Reverse"
)


def _of_stack(sharding: str) -> dict[str, Any]:
    """The training of 16 stacked layers on four devices."""
    start = f"{sharding}, 16 stacked layers"
    row = next(row for row in _rows("scaling") if row["name"].startswith(start))
    return row["columns"]["4 devices"] | {"memory": row["memory"]["4 devices"]}


def _megabytes_of_stack(sharding: str, kind: str) -> str:
    return f"{_of_stack(sharding)['memory'][kind] / 1e6:.2f} MB"


# The time of FSDP as a multiple of the time with all layers gathered at once.
TIME_OF_STACK = _of_stack("FSDP")["completion_us"] / _of_stack("layers at once")["completion_us"]


def _range(ratios: Iterable[float], digits: int = 2) -> str:
    least, *_, most = sorted(ratios)
    return f"{_short(least, digits)} to {_short(most, digits)}"


def _short(number: float, digits: int) -> str:
    """A ratio as text: without decimals if it is ten or more."""
    return f"{number:.{digits if number < 10 else 0}f}"


def _seconds(row: str) -> str:
    columns = _row("jit_edges", row, "First call of a training step")
    return f"{columns['filter_jit']['completion_us'] / 1e6:.2f} s"


def _of_loop(name: str) -> float:
    """The time of the gradient of the long recurrence, as a multiple of `lax.scan`'s time."""
    return _ratios([_row("loops", "gradient, 64-wide tanh, 10000 steps")], name)[0]


THE_CHART = (
    "Time of a call compared with jax.jit, for four functions: filter_jit of eqxlike takes "
    f"{_of_chart('filter_jit')} times as long, Equinox {_of_chart(EQUINOX, 1)} "
    f"times, nnx.jit of Flax {_of_chart(NNX, 1)} times"
)


def _cells(row: dict[str, Any], names: Iterable[str], unit: str) -> str:
    """A row of the README's table, without link targets."""
    titles, found = table.cells({"rows": [row]}, "completion", unit=UNITS[unit])
    times = dict(zip(titles, found, strict=True))
    return " | ".join(f"[{times[name].partition(' ')[0]} {unit}](" for name in names)


UNITS = {"µs": "microseconds", "ms": "milliseconds"}
CALLS = ("filter_jit", EQUINOX, NNX)
STEPS = ("eqxlike", "Equinox", "NNX")
ON_CPU = {
    "call of an MLP, 2 layers of 64, one example": "MLP forward, depth 2, width 64",
    "step of Adam, 8 layers of 32, batch 32": "Adam step, depth 8, width 32, batch 32",
    "call of an MLP, 2 layers of 256, batch 1000": "MLP forward, depth 2, width 256, batch 1000",
}
ON_GPU = {
    "step of Adam, transformer, 6 layers of 256": (
        "language model, 6 layers of 256, 128 tokens, batch 8"
    ),
    "step of Adam, LSTM, 128 time steps": "LSTM 32-64, 128 steps, batch 16",
}


def test_table_of_the_readme_has_the_figures_of_the_committed_runs():
    readme = re.sub(r"\]\([^)]*\)", "](", (ROOT / "README.md").read_text())
    on_cpu = {row["name"]: row for row in _rows("jit_overhead")}
    on_gpu = {row["name"]: row for row in _rows("models", "0.11.2", "gpu")}
    rows = [
        *(
            f"| CPU: {title} | {_cells(on_cpu[name], CALLS, 'µs')}"
            for title, name in ON_CPU.items()
        ),
        *(
            f"| H100 GPU: {title} | {_cells(on_gpu[name], STEPS, 'ms')}"
            for title, name in ON_GPU.items()
        ),
    ]
    assert [row for row in rows if row not in readme] == []


SCAN_STACK = _ratios(
    [_row("layers", "64 MLPs of width 64", "Trace, lower and compile a stack of equal layers")],
    "ScanStack",
)[0]
QUOTED = {
    "README.md": [THE_CHART],
    "docs/index.md": [THE_CHART],
    "docs/from-flax.md": [
        f"over its {len(_rows('jit_overhead'))} rows",
        f"`nnx.jit` takes {_range(_of_calls(NNX), 1)} times",
        f"`filter_jit` {_range(_of_calls('filter_jit'))} times",
    ],
    "docs/costs.md": [
        f"An Adam step of 2 layers takes {_seconds('Adam step, depth 2')}",
        f"one of 64 layers {_seconds('Adam step, depth 64')}",
        f"64 layers took {SCAN_STACK:.2f} of the time",
        f"{REVERSE[0]:.2f} to {REVERSE[23]:.1f} times in 24 of {len(REVERSE)} rows, "
        f"{REVERSE[-1]:.1f} times at most",
    ],
    "docs/layers.md": [
        f"network takes {_of_layers('Construct a model from a key')} times",
        f"Outputs take {_of_layers('Forward pass')} times as long as",
        f"Gradients take {_of_layers('Value and gradient')} times as",
        f"takes {_of_layers('Construct a deep model')} of the time",
        f"{_of_layers('Construct a deep model', jax='0.12.0.1')} on jax 0.12.0.1",
        f"are compiled in {SCAN_STACK:.2f} of the time",
    ],
    "docs/loops.md": [
        f"takes {_of_loop('scan, checkpointed'):.2f} times as long as",
        f"takes {_of_loop('equinox.internal while_loop, checkpointed'):.2f} times as long.",
    ],
    "docs/training.md": [
        f"layers take {_megabytes_of_stack('FSDP', 'within a step')} more",
        f"took {TIME_OF_STACK:.1f} times as long as",
        f"each device holds {_megabytes_of_stack('FSDP', 'at rest')}: its shards",
        f"at once takes {_megabytes_of_stack('layers at once', 'within a step')}",
    ],
}


@pytest.mark.parametrize("page", QUOTED)
def test_text_quotes_the_committed_runs(page):
    text = re.sub(r"\s+", " ", (ROOT / page).read_text())
    assert [words for words in QUOTED[page] if words not in text] == []


def test_number_of_models_equals_the_committed_run():
    assert len({row["name"] for row in _rows("ad-modes")}) == 16
    assert "sixteen models" in (ROOT / "docs" / "costs.md").read_text()


def test_times_of_a_call_equal_the_committed_run():
    columns = _row("jit_overhead", "MLP forward, depth 2, width 64")
    us = {name: f"{column['completion_us']:.0f} µs" for name, column in columns.items()}
    page = re.sub(r"\s+", " ", (ROOT / "docs" / "costs.md").read_text())
    assert (
        f"takes {us['filter_jit']} with `filter_jit`, {us['jax.jit, module']} with `jax.jit` on "
        f"the same model, {us[EQUINOX]} with Equinox's `filter_jit` and {us[NNX]} with `nnx.jit`. "
        f"The least possible is {us['jax.jit, flat list']}, with"
    ) in page


def test_table_of_exactness_equals_the_committed_run():
    drawn = table.markdown_table(exactness.cells(_rows("exactness")))
    assert drawn in (ROOT / "docs" / "bayes.md").read_text()
