"""The history has a point for every committed run, and the page shows the point."""

import pytest

from benchmarks import trend
from docs.site import measured
from docs.site import trend as page

POINTS = {trend.key(each): each for each in trend.history()}


@pytest.fixture
def empty_history(tmp_path, monkeypatch):
    path = tmp_path / "history.jsonl"
    monkeypatch.setattr(trend, "HISTORY", path)
    return path


@pytest.fixture
def one_point():
    machine = {"date": "2026-01-01T00:00:00", "jax": "0.10.2", "cpu": "one", "eqxlike": "0.1.0"}
    report = {"machine": machine, "method": {}, "is_complete": True, "rows": []}
    return trend.point("loops", report) | {"figures": {"a": 1.0}}


@pytest.mark.parametrize(
    "found", list(trend.committed()), ids=lambda found: "-".join(trend.key(found))
)
def test_committed_run_has_its_point(found):
    assert trend.key(found) in POINTS, "python -m benchmarks.trend --add"
    assert POINTS[trend.key(found)]["figures"] == found["figures"]
    assert found["figures"]


def test_lines_are_added_and_old_lines_stay(empty_history, one_point):
    trend.add([one_point])
    before = empty_history.read_text()
    assert trend.main(["--add"]) == 0
    assert trend.main(["--add"]) == 0
    assert empty_history.read_text().startswith(before)
    assert len(trend.history()) == 1 + len(list(trend.committed()))


DAMAGED = ["[1]", '{"benchmark": "loops"', '{"benchmark": "loops", "machine": {}, "figures": {}}']


@pytest.mark.parametrize("line", DAMAGED)
def test_damaged_line_is_named_and_nothing_is_added(empty_history, one_point, capsys, line):
    trend.add([one_point])
    damaged = empty_history.read_text() + line + "\n"
    empty_history.write_text(damaged)
    with pytest.raises(ValueError, match=r"history\.jsonl, line 2 is not a point of a run: "):
        trend.history()
    with pytest.raises(SystemExit):
        trend.main(["--add"])
    assert "line 2 is not a point" in capsys.readouterr().err
    assert empty_history.read_text() == damaged


def test_page_shows_every_point():
    shown = measured.files()[page.PATH]
    rows = [line for line in shown.splitlines() if line.startswith("| 20")]
    assert len(rows) == len(POINTS)
    assert {page.TITLE: page.PATH} in measured.menu()
