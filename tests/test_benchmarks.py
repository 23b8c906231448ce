"""The benchmark: its columns compute the same, its report is complete. No test looks at a clock."""

import importlib.util
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import cases, columns, jit_overhead, networks, report, table
from eqxlike._timing import Samples, summarise

PEERS = {columns.EQUINOX_MODULE: "equinox", columns.EQUINOX: "equinox", columns.NNX: "flax"}
INSTALLED = [
    name
    for name in (columns.FLAT, columns.MODULE, columns.OURS, columns.WATCHED, *PEERS)
    if name not in PEERS or importlib.util.find_spec(PEERS[name])
]


@pytest.fixture
def standard_promotion():
    """What Optax's Adam needs: it raises a float to the power of an integer array."""
    with jax.numpy_dtype_promotion("standard"):
        yield


@pytest.mark.usefixtures("standard_promotion")
@pytest.mark.parametrize(
    "case",
    [
        cases.identity(),
        cases.mlp_forward(2, 8),
        cases.mlp_forward(2, 8, batch=5),
        cases.adam_step(2, 8),
        cases.elbo_step(batch=4),
    ],
    ids=lambda case: case.slug,
)
def test_all_columns_agree(case):
    calls, notes = cases.build(case)
    assert list(calls) == INSTALLED
    assert len(notes) == len(case.builders) - len(INSTALLED)
    cases.check_agreement(calls)


@pytest.mark.usefixtures("standard_promotion")
def test_training_steps_feed_their_state_back():
    calls, _ = cases.build(cases.adam_step(2, 8))
    for call in calls.values():
        losses = [float(call()) for _ in range(4)]
        assert losses == sorted(losses, reverse=True)
        assert len(set(losses)) == 4


def test_disagreement_names_the_column():
    calls = {"one": lambda: jnp.zeros(2), "two": lambda: jnp.asarray([0.0, 0.1])}
    with pytest.raises(AssertionError, match="'two' differs from 'one' at call 1"):
        cases.check_agreement(calls)


def test_peer_that_is_not_installed_costs_a_note():
    def missing():
        raise ImportError("No module named 'peer'")

    case = cases.Case("row", {"there": lambda: lambda: 1, "peer": missing}, baseline="there")
    calls, notes = cases.build(case)
    assert list(calls) == ["there"]
    assert notes == ["peer is left out: No module named 'peer'"]


def test_issue_names_these_rows():
    names = [case.name for case in cases.CASES]
    assert len(names) == len(set(names)) == len({case.slug for case in cases.CASES})
    for pattern in (
        r"^Identity, \(1, 1\)$",
        *(rf"^MLP forward.* width {2**power}$" for power in (5, 6, 7, 8)),
        *(rf"^MLP forward.* width {2**power}, batch 1000$" for power in (5, 6, 7, 8)),
        *(rf"^MLP forward, depth {depth}," for depth in (2, 8, 64)),
        *(rf"^Adam step, depth {depth}," for depth in (2, 8, 64)),
        r"^ELBO step",
    ):
        assert any(re.search(pattern, name) for name in names), pattern


def test_select_finds_by_pattern_in_any_case_of_letters():
    assert [case.name for case in cases.select("IDENTITY")] == ["Identity, (1, 1)"]
    assert len(cases.select("")) == len(cases.CASES)


@pytest.mark.parametrize(
    ("pattern", "message"), [("nothing", "no case matches 'nothing'"), ("(", "regular expression")]
)
def test_select_says_what_there_is(pattern, message):
    with pytest.raises(ValueError, match=message):
        cases.select(pattern)


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """The report of a quick run of one row, as it was written."""
    path = tmp_path_factory.mktemp("folder") / "made" / "report.json"
    arguments = ["--quick", "--rounds", "2", "--rows", "Identity", "--json", str(path)]
    assert jit_overhead.main(arguments) == 0
    return path


def test_report_is_complete(written):
    found = json.loads(written.read_text())
    assert found["is_complete"]
    assert found["method"]["rounds"] == 2
    assert {"jax", "jaxlib", "equinox", "flax", "python", "cpu", "cores", "date"} <= set(
        found["machine"]
    )
    (row,) = found["rows"]
    assert row["name"] == "Identity, (1, 1)"
    assert row["baseline"] == columns.MODULE
    assert list(row["columns"]) == INSTALLED
    for column in row["columns"].values():
        for kind in ("dispatch", "completion"):
            assert column[f"{kind}_us"] > 0
            assert set(column[f"{kind}_ratio"]) == {"lower", "median", "upper"}
            assert len(column["samples"][f"{kind}_us"]) == 2


def test_written_report_gives_the_same_table(written, capsys):
    assert table.main([str(written)]) == 0
    printed = capsys.readouterr().out
    assert "Identity, (1, 1)" in printed
    assert all(name in printed for name in INSTALLED)
    assert printed.count("(1.00)") >= 2
    assert table.main([str(written), "--baseline", columns.FLAT, "--markdown"]) == 0
    assert f"(ratio to {columns.FLAT})" in capsys.readouterr().out


def test_unknown_baseline_is_one_line(written, capsys):
    assert table.main([str(written), "--baseline", "none"]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def small_report():
    samples = {
        columns.MODULE: Samples((10.0, 10.0), (20.0, 20.0), 1),
        columns.OURS: Samples((5.0, 6.0), (210.0, 190.0), 1),
    }
    result = report.new_report({"rounds": 2})
    result["rows"].append(report.row("row", summarise(samples, columns.MODULE), ["a note"]))
    return result


def test_report_survives_json():
    (row,) = json.loads(json.dumps(small_report()))["rows"]
    measured = report.measurement(row)
    assert measured.columns[columns.OURS].completion_us == 200
    again = report.measurement(row, columns.OURS)
    assert again.columns[columns.MODULE].completion_ratio.median == pytest.approx(0.1, rel=0.01)


def test_cells_hold_time_and_ratio():
    assert table.cells(small_report(), "completion") == [
        ["", columns.MODULE, columns.OURS],
        ["row", "20.0 (1.00)", "200 (10.00)"],
    ]


def test_text_table_is_aligned():
    lines = table.text_table([["", "a"], ["name", "1.0 (1.00)"]]).splitlines()
    assert lines == ["               a", "-" * 16, "name  1.0 (1.00)"]


def test_markdown_table_has_a_rule():
    assert table.markdown_table([["", "a"], ["name", "1"]]) == (
        "|  | a |\n| --- | ---: |\n| name | 1 |"
    )


def test_notes_and_versions_stand_under_the_tables():
    text = table.render(small_report(), markdown=False)
    assert text.endswith("a note")
    assert "eqxlike" in text
    assert "2 interleaved rounds" in text


def test_ctrl_c_prints_and_keeps_what_was_measured(monkeypatch, capsys, tmp_path):
    def interrupted():
        raise KeyboardInterrupt

    first = cases.identity()
    second = cases.Case("second", {columns.MODULE: interrupted})
    monkeypatch.setattr(cases, "CASES", (first, second))
    path = tmp_path / "report.json"
    assert jit_overhead.main(["--rounds", "1", "--json", str(path)]) == 130
    assert "Identity" in capsys.readouterr().out
    found = json.loads(path.read_text())
    assert [row["name"] for row in found["rows"]] == ["Identity, (1, 1)"]
    assert not found["is_complete"]


def test_wrong_rows_and_unwritable_file_are_told_before_measuring(capsys, tmp_path):
    assert jit_overhead.main(["--rows", "nothing"]) == 2
    assert "no case matches 'nothing'" in capsys.readouterr().err
    (tmp_path / "file").write_text("")
    assert jit_overhead.main(["--json", str(tmp_path / "file" / "report.json")]) == 2
    assert capsys.readouterr().err.startswith("benchmarks.jit_overhead: ")


def test_weights_are_the_same_for_every_library():
    shapes = [array.shape for array in networks.weights([3, 5, 2])]
    assert shapes == [(5, 3), (5,), (2, 5), (2,)]
    for one, other in zip(networks.weights([3, 5]), networks.weights([3, 5]), strict=True):
        np.testing.assert_array_equal(one, other)
