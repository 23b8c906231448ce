"""The benchmark of exported networks: what it times are processes; no clock is looked at."""

import json

import pytest

from benchmarks import export, export_process
from benchmarks.export_process import COLUMNS, EXPORTED, TRACED

ROW = export.Row(depth=1, is_kept=True)


def test_report_has_every_column_and_its_rounds(tmp_path, monkeypatch):
    def in_process(column, row, folder):
        assert (folder / export_process.IMAGES).exists()
        return export_process.timed(column, row.depth, folder)

    monkeypatch.setattr(export, "in_process", in_process)
    path = tmp_path / "report.json"
    assert export.main(["--rounds", "2", "--json", str(path)], [ROW]) == 0
    written = json.loads(path.read_text())
    (row,) = written["rows"]
    assert list(row["columns"]) == list(COLUMNS)
    assert row["baseline"] == TRACED
    assert [len(each["samples"]["completion_us"]) for each in row["columns"].values()] == [2] * 3


def test_a_first_call_is_timed_in_a_process_of_its_own(tmp_path):
    export.prepare(tmp_path, ROW.depth)
    found = export.in_process(EXPORTED, ROW, tmp_path)
    assert found["first_s"] > 0
    assert list((tmp_path / "compiled").iterdir())


def test_other_numbers_are_an_error(monkeypatch):
    sums = iter((1.0, 1.0, 1.0, 1.0, 2.0, 1.0))
    monkeypatch.setattr(export, "prepare", lambda *of_row: None)
    monkeypatch.setattr(export, "in_process", lambda *of_call: {"first_s": 1.0, "sum": next(sums)})
    with pytest.raises(AssertionError, match="Not equal to tolerance"):
        export.measure(ROW, rounds=1)


def test_rows_have_names_of_their_own():
    assert len({row.name for row in export.ROWS}) == len(export.ROWS) == 4
