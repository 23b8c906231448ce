"""The import benchmark: what it times is an import in a fresh process; no clock is looked at."""

import json
import os
import sys

import pytest

from benchmarks import cases, import_time
from benchmarks.import_time import EQUINOX, JAX, NNX, OURS

ROW = import_time.row(
    "small modules",
    {OURS: "import colorsys", EQUINOX: "import json", NNX: "from no_such_module import nothing"},
)


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """The report of one round of a small row, as it was written."""
    path = tmp_path_factory.mktemp("folder") / "report.json"
    before = dict(os.environ)
    assert import_time.main(["--rounds", "2", "--json", str(path)], [ROW]) == 0
    assert dict(os.environ) == before
    return json.loads(path.read_text())


def test_report_has_every_column_that_is_installed(written):
    (row,) = written["rows"]
    assert list(row["columns"]) == [OURS, EQUINOX]
    assert row["baseline"] == EQUINOX
    assert "no_such_module" in row["notes"][0]
    assert written["is_complete"]


def test_each_round_is_one_process_a_column(written):
    columns = written["rows"][0]["columns"].values()
    assert all(len(column["samples"]["completion_us"]) == 2 for column in columns)


def test_without_equinox_ratios_are_to_ours():
    assert import_time.measure({OURS: lambda: 1.0, JAX: lambda: 0.5}, rounds=1).baseline == OURS


def test_an_import_is_timed_in_a_process_of_its_own(monkeypatch):
    # Here the module cannot be imported.
    monkeypatch.setitem(sys.modules, "colorsys", None)
    assert import_time.import_s("import colorsys") > 0


def test_a_failing_import_is_told():
    with pytest.raises(Exception, match="returned non-zero exit status 1"):
        import_time.import_s("import no_such_module")


def test_rows_compare_with_equinox_and_with_jax_alone():
    for row in import_time.ROWS:
        calls, notes = cases.build(row)
        assert notes == []
        assert list(calls) == [JAX, OURS, EQUINOX, NNX]
