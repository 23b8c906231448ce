"""The benchmark of libraries built on Equinox, with times that are made up."""

import json

import pytest

from benchmarks import downstream, import_time, table
from benchmarks.downstream import EQUINOX, FIRST, IMPORT, OURS, WARM, Row

ROWS = (
    Row(IMPORT, "a_library"),
    Row(FIRST, "a_topic", "a program"),
    Row(WARM, "a_topic", "a program"),
)


@pytest.fixture
def processes(monkeypatch):
    """The processes that would have been started."""
    started = []

    def in_process(library, topic, program):
        started.append((library, topic, program))
        seconds = 2.0 if library == "equinox" else 1.0
        return {"first_s": 10 * seconds, "later_s": [9.0, seconds, 0.1], "sums": [1.0, 2.0]}

    def import_s(statement):
        started.append(statement)
        return 3.0 if "install_as_equinox" in statement else 4.0

    downstream.samples_of.cache_clear()
    monkeypatch.setattr(downstream, "in_process", in_process)
    monkeypatch.setattr(import_time, "import_s", import_s)
    return started


@pytest.fixture
def written(processes, tmp_path):
    path = tmp_path / "report.json"
    assert downstream.main(["--rounds", "2", "--json", str(path)], ROWS) == 0
    return path


def test_each_row_stands_in_its_table_with_ratios_to_equinox(written):
    found = json.loads(written.read_text())
    assert [(row["table"], row["name"]) for row in found["rows"]] == [
        (IMPORT, "import a_library"),
        (FIRST, "a_topic: a program"),
        (WARM, "a_topic: a program"),
    ]
    ours, theirs = (
        [row["columns"][column]["completion_us"] / 1e6 for row in found["rows"]]
        for column in (OURS, EQUINOX)
    )
    assert ours == [3.0, 10.0, 1.0]
    assert theirs == [4.0, 20.0, 2.0]
    assert {"lineax", "optimistix", "diffrax", "equinox", "jax"} <= set(found["machine"])


def test_report_prints_one_table_for_each_kind(written, capsys):
    capsys.readouterr()
    assert table.main([str(written)]) == 0
    printed = capsys.readouterr().out
    for title in (IMPORT, FIRST, WARM):
        heading = f"{title}: completion, milliseconds a call until the result is ready"
        assert printed.count(f"{heading} (ratio to Equinox)") == 1


def test_first_and_later_calls_of_a_program_are_of_the_same_processes(written, processes):
    of_programs = [each for each in processes if isinstance(each, tuple)]
    assert sorted(of_programs) == [
        *[("equinox", "a_topic", "a program")] * 2,
        *[("eqxlike", "a_topic", "a program")] * 2,
    ]


def test_ours_stands_in_before_the_library_is_imported(written, processes):
    assert {each for each in processes if isinstance(each, str)} == {
        "import a_library",
        "import eqxlike; eqxlike.install_as_equinox(); import a_library",
    }


def test_other_numbers_are_told(processes, monkeypatch):
    def in_process(library, topic, program):
        return {"first_s": 1.0, "later_s": [1.0], "sums": [float(library == "equinox")]}

    monkeypatch.setattr(downstream, "in_process", in_process)
    with pytest.raises(AssertionError, match="a_topic: a program"):
        downstream.measure(ROWS[1], rounds=1)
