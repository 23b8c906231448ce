"""Figures in the words of a page are those of the committed run that they come from."""

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
CELL = re.compile(r"^\| (?P<what>.*?) \| (?P<microseconds>[\d.]+) \|$", re.MULTILINE)


@functools.cache
def _rows(benchmark: str, jax: str = "0.10.2", device: str = "cpu") -> list[dict[str, Any]]:
    return json.loads((RESULTS / f"{benchmark}-{device}-jax-{jax}.json").read_text())["rows"]


def _row(benchmark: str, name: str, of: str | None = None) -> dict[str, Any]:
    rows = (row for row in _rows(benchmark) if row.get("table") == of)
    return next(row["columns"] for row in rows if row["name"] == name)


def _ratios(columns: Iterable[Mapping[str, Any]], name: str) -> list[float]:
    return [each[name]["completion_ratio"]["median"] for each in columns]


def _of_calls(name: str) -> list[float]:
    return _ratios((row["columns"] for row in _rows("jit_overhead")), name)


def _of_chart(name: str) -> list[float]:
    return _ratios((_row("jit_overhead", row) for row in chart.ROWS), name)


def _of_layers(title: str, jax: str = "0.10.2") -> list[float]:
    rows = (row for row in _rows("layers", jax) if row["table"].startswith(title))
    return _ratios((row["columns"] for row in rows), "eqxlike")


def _of_models_on_gpu(name: str) -> list[float]:
    return _ratios((row["columns"] for row in _rows("models", "0.11.2", "gpu")), name)


def _of_reverse() -> list[float]:
    """What reverse mode takes, as a multiple of the value alone, least first."""
    modes = (mode for row in _rows("ad-modes") for mode in row["modes"])
    return sorted(mode["ratio"] for mode in modes if mode["mode"] == "Reverse")


def _of_stack(sharding: str) -> dict[str, Any]:
    """The training of 16 stacked layers over four devices."""
    start = f"{sharding}, 16 stacked layers"
    row = next(row for row in _rows("scaling") if row["name"].startswith(start))
    return row["columns"]["4 devices"] | {"memory": row["memory"]["4 devices"]}


def _megabytes_of_stack(sharding: str, kind: str) -> str:
    return f"{_of_stack(sharding)['memory'][kind] / 1e6:.2f} MB"


def _time_of_stack() -> float:
    """What FSDP takes, as a multiple of the time with the layers together."""
    layer_by_layer, at_once = (
        _of_stack(each)["completion_us"] for each in ("FSDP", "layers at once")
    )
    return layer_by_layer / at_once


def _range(ratios: Iterable[float], digits: int = 2) -> str:
    least, *_, most = sorted(ratios)
    return f"{_short(least, digits)} to {_short(most, digits)}"


def _short(number: float, digits: int) -> str:
    """As a sentence writes a ratio: no digits behind the point from ten on."""
    return f"{number:.{digits if number < 10 else 0}f}"


def _seconds(row: str) -> str:
    columns = _row("jit_edges", row, "First call of a training step")
    return f"{columns['filter_jit']['completion_us'] / 1e6:.2f} s"


THE_CHART = (
    f"On these four rows a call of eqxlike's filter_jit takes {_range(_of_chart('filter_jit'))} of "
    f"the time of jax.jit, Equinox's {_range(_of_chart(EQUINOX), 1)} times it, Flax's nnx.jit "
    f"{_range(_of_chart(NNX), 1)} times"
)
SCAN_STACK = _ratios(
    [_row("layers", "64 MLPs of width 64", "Trace, lower and compile a stack of equal layers")],
    "ScanStack",
)[0]
QUOTED = [
    ("README.md", THE_CHART),
    ("README.md", f"all {len(_rows('jit_overhead'))} rows | [{_range(_of_calls('filter_jit'))} of"),
    ("README.md", f"[{min(_of_calls(EQUINOX)):.2f} to {max(_of_calls(EQUINOX)):.1f}]("),
    ("README.md", f"[{_range(_of_calls(NNX), 1)}]("),
    ("README.md", f"five networks | [{_range(_of_models_on_gpu('eqxlike'))} of it]("),
    ("README.md", f"[{_range(_of_models_on_gpu('Equinox'))}]("),
    ("docs/index.md", THE_CHART),
    ("docs/from-flax.md", f"over its {len(_rows('jit_overhead'))} rows"),
    ("docs/from-flax.md", f"`nnx.jit` takes {_range(_of_calls(NNX), 1)} times"),
    ("docs/from-flax.md", f"`filter_jit` {_range(_of_calls('filter_jit'))} times"),
    ("docs/costs.md", f"an Adam step of 2 layers takes {_seconds('Adam step, depth 2')}"),
    ("docs/costs.md", f"one of 64 layers {_seconds('Adam step, depth 64')}"),
    ("docs/costs.md", f"64 layers took {SCAN_STACK:.2f} of the time"),
    ("docs/costs.md", f"24 of {len(_of_reverse())} rows"),
    (
        "docs/costs.md",
        f"{_of_reverse()[0]:.2f} to {_of_reverse()[23]:.1f} times in 24 of",
    ),
    ("docs/costs.md", f"rows, {_of_reverse()[-1]:.1f} times at most"),
    ("docs/layers.md", f"are built in {_range(_of_layers('Construct a model from a key'))} of"),
    ("docs/layers.md", f"computed in {_range(_of_layers('Forward pass'))} of it"),
    ("docs/layers.md", f"gradients in {_range(_of_layers('Value and gradient'))}."),
    ("docs/layers.md", f"takes {_range(_of_layers('Construct a deep model'))} of the time"),
    (
        "docs/layers.md",
        f"{_range(_of_layers('Construct a deep model', jax='0.12.0.1'))} on jax 0.12.0.1",
    ),
    ("docs/layers.md", f"are compiled in {SCAN_STACK:.2f} of the time"),
    ("docs/training.md", f"take {_megabytes_of_stack('FSDP', 'within a step')} within a step"),
    ("docs/training.md", f"took {_time_of_stack():.1f} times as long there"),
    ("docs/training.md", f"next to the {_megabytes_of_stack('FSDP', 'at rest')} of each device"),
    (
        "docs/training.md",
        f"{_megabytes_of_stack('layers at once', 'within a step')} where they are",
    ),
]


def test_words_quote_the_committed_runs():
    pages = {page: re.sub(r"\s+", " ", (ROOT / page).read_text()) for page, _ in QUOTED}
    assert [(page, words) for page, words in QUOTED if words not in pages[page]] == []


def test_number_of_models_is_that_of_the_table():
    assert len({row["name"] for row in _rows("ad-modes")}) == 16
    assert "sixteen models" in (ROOT / "docs" / "costs.md").read_text()


def test_table_of_a_call_is_that_of_the_committed_run():
    columns = _row("jit_overhead", "MLP forward, depth 2, width 64")
    found = {name: f"{column['completion_us']:.0f}" for name, column in columns.items()}
    quoted = dict(CELL.findall((ROOT / "docs" / "costs.md").read_text()))
    assert quoted == {
        "`jax.jit` on a list of its arrays, MLP of 2 layers of 64": found["jax.jit, flat list"],
        "`filter_jit` on the model": found["filter_jit"],
        "`jax.jit` on the model": found["jax.jit, module"],
        "Equinox's `filter_jit`": found[EQUINOX],
        "`nnx.jit`": found[NNX],
    }


def test_table_of_exactness_is_that_of_the_committed_run():
    drawn = table.markdown_table(exactness.cells(_rows("exactness")))
    assert drawn in (ROOT / "docs" / "bayes.md").read_text()


@pytest.mark.parametrize("clock", table.CLOCKS)
def test_table_of_calls_is_that_of_the_committed_run(clock):
    drawn = table.markdown_table(table.cells({"rows": _rows("jit_overhead")}, clock))
    assert drawn in (ROOT / "docs" / "calls.md").read_text()
