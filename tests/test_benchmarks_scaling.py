"""The benchmark of training over several devices: what it says of memory. No clock is read."""

import json

import pytest

from benchmarks import scaling
from benchmarks.scaling import Row

ROW = Row("FSDP", 1, 32)


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    path = tmp_path_factory.mktemp("scaling") / "report.json"
    assert scaling.main(["--rounds", "1", "--json", str(path)], [ROW]) == 0
    return json.loads(path.read_text())


def test_memory_is_divided_by_the_number_of_devices(report):
    (row,) = report["rows"]
    alone, half = (row["memory"][column]["at rest"] for column in ("1 device", "2 devices"))
    assert 0.5 <= half / alone < 0.51
    assert row["memory"]["1 device"]["exchanged"] == 0 < row["memory"]["2 devices"]["exchanged"]


def test_devices_that_are_not_here_are_named(report):
    (row,) = report["rows"]
    assert list(row["columns"]) == ["1 device", "2 devices"]
    assert row["notes"] == ["left out, as there are no more devices: 4 devices"]


def test_large_training_is_planned_for_every_mesh(report):
    plans = report["plans"]
    assert len(plans) == 4
    for text in plans.values():
        # 6,738,415,616 parameters of four bytes.
        assert "26,953,662,464" in text
    (split,) = [text for name, text in plans.items() if "FSDP" in name and "64" in name]
    assert f"{26_953_662_464 // 64:,}" in split


def test_share_of_one_device_decides_the_target():
    def row(name, half):
        memory = {"1 device": {"at rest": 100}, "2 devices": {"at rest": half}}
        return {"name": name, "memory": memory}

    assert [each.is_reached for each in scaling.targets([row("FSDP, small", 51)])] == [True]
    assert [each.is_reached for each in scaling.targets([row("FSDP, small", 60)])] == [False]
    assert scaling.targets([row("data parallel, small", 100)]) == []


def test_printed_report_has_memory_targets_plans_and_times(report):
    printed = scaling.shown(report, markdown=False)
    titles = [
        "Memory, bytes on one device",
        "Targets",
        "A transformer of seven",
        "Completion, micro",
    ]
    places = [printed.index(title) for title in titles]
    assert places == sorted(places)


def test_rows_that_no_pattern_finds_are_refused(capsys):
    assert scaling.main(["--rows", "nothing of the kind"]) == 2
    assert "no case matches 'nothing of the kind'" in capsys.readouterr().err
