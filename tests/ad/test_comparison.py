"""`ad.Comparison` as text, JSON and a picture."""

import io
import re
import sys

import numpy as np
import pytest
import rich.console

from eqxlike import ad

KNOWN = ad.Comparison(
    rows=(
        ad.ComparisonRow(
            mode="Reverse()",
            verdict="ok",
            primal_us=36.25,
            primal_dispatch_us=11.5,
            gradient_us=54.31,
            gradient_dispatch_us=22.75,
            ratio=1.4982,
            rounds=30,
            first_call_ms=131.4,
            traced_operations=54,
            compiled_operations=2139,
            peak_bytes=2640,
            max_relative_error=1.1e-7,
            worst_path="args[0].weight",
        ),
        ad.ComparisonRow(
            mode="[Forward]",
            verdict="wrong",
            explanation="The gradient by args[0] is off.",
            gradient_us=1234.5,
            peak_bytes=0,
            max_relative_error=0.5,
        ),
        ad.ComparisonRow(mode="None", verdict="error", explanation="ValueError: no\nand more"),
    ),
    reference="FiniteDifference(order=4)",
    tolerance=0.125,
    machine={"cpu": "A processor", "device": "cpu", "jax": "0.10.2"},
)


def test_text_is_a_table_with_explanations():
    assert str(KNOWN) == (
        "Mode       Primal us  Gradient us  Ratio  Dispatch us  First call ms  Operations  "
        "Peak bytes    Error  Verdict\n"
        "Reverse()       36.2         54.3   1.50  11.5 / 22.8            131  54 / 2,139  "
        "     2,640  1.1e-07  ok\n"
        "[Forward]          -        1,234      -  - / -                    -  - / -       "
        "         0  5.0e-01  wrong\n"
        "None               -            -      -  - / -                    -  - / -       "
        "         -        -  error\n"
        "[Forward]: The gradient by args[0] is off.\n"
        "None: ValueError: no [...]\n"
        "Dispatch: of primal / gradient. Operations: traced / compiled.\n"
        "cpu; jax 0.10.2; error: relative to FiniteDifference(order=4) in float64"
    )


def test_text_needs_no_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "rich", None)
    monkeypatch.setitem(sys.modules, "rich.table", None)
    assert str(KNOWN).startswith("Mode")
    with pytest.raises(ImportError, match=re.escape("pip install 'eqxlike[train]'")):
        KNOWN.table()


def test_rich_shows_the_same_cells():
    stream = io.StringIO()
    rich.console.Console(file=stream, width=200).print(KNOWN)
    shown = stream.getvalue()
    for row in KNOWN.rows:
        for cell in row.cells:
            assert cell in shown


def test_json_is_read_back(comparison):
    for each in (KNOWN, comparison):
        assert ad.Comparison.from_json(each.to_json()) == each


def test_other_json_is_an_error():
    not_ours = ['{"rows": 3}', '{"rows": [{"mode": 1}]}', '{"rows": [], "a": 1}']
    for text in ("", "3", "[]", "{}", *not_ours):
        with pytest.raises(ValueError, match=re.escape("expects what Comparison.to_json wrote")):
            ad.Comparison.from_json(text)


def test_best_is_the_fastest_that_is_ok():
    rows = (
        ad.ComparisonRow("slow", "ok", gradient_us=2.0),
        ad.ComparisonRow("fast", "ok", gradient_us=1.0),
        ad.ComparisonRow("wrong", "wrong", gradient_us=0.5),
        ad.ComparisonRow("not timed", "ok"),
    )
    assert ad.Comparison(rows).best is rows[1]
    assert ad.Comparison(rows[2:]).best is None


def test_plot_has_a_point_and_a_name_for_each_mode_that_was_measured():
    figure = KNOWN.plot()
    (axes,), (legend,) = figure.axes, figure.legends
    assert (axes.get_xscale(), axes.get_yscale()) == ("log", "symlog")
    points = np.concatenate([each.get_offsets() for each in axes.collections])
    np.testing.assert_allclose(points, [[54.31, 2640], [1234.5, 0]])
    names = [each.get_text() for each in legend.get_texts()]
    assert names == ["Reverse(): ok", "[Forward]: wrong"]


def test_plot_of_nothing_is_an_error():
    with pytest.raises(ValueError, match="no mode was measured, so there is nothing to draw"):
        ad.Comparison(KNOWN.rows[2:]).plot()


def test_plot_without_matplotlib_is_an_error_that_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=re.escape("pip install 'eqxlike[plot]'")):
        KNOWN.plot()
