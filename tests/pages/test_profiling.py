"""The profiler writes its files. No test uses a clock."""

import json

import pytest

pytest.importorskip("pyinstrument")

from pyinstrument.session import Session

from benchmarks import jit_overhead
from benchmarks.timing import Column, Quartiles, Samples, measure
from eqxlike import _profile
from profiling import jit_dispatch


def test_profiler_writes_a_tree_a_page_and_the_session(monkeypatch, tmp_path, capsys):
    def few_rounds(*arguments, rounds, **options):
        return measure(*arguments, rounds=2, **options)

    monkeypatch.setattr(jit_dispatch, "measure", few_rounds)
    out = tmp_path / "made"
    assert jit_dispatch.main(["--case", "^identity", "--out", str(out), "--calls", "100"]) == 0
    printed = capsys.readouterr().out
    assert "Identity, (1, 1)" in printed
    assert "jax.jit" in printed
    name = jit_overhead.identity().slug
    suffixes = (".txt", ".html", ".pyisession")
    assert {path.name for path in out.iterdir()} == {name + suffix for suffix in suffixes}
    assert "sample" in (out / f"{name}.txt").read_text()
    assert "<html>" in (out / f"{name}.html").read_text()
    loaded = Session.load(out / f"{name}.pyisession")
    assert _profile.self_times(loaded)
    assert json.loads((out / f"{name}.pyisession").read_text())["frame_records"]


def test_wrong_case_and_unwritable_folder_are_errors(capsys, tmp_path):
    assert jit_dispatch.main(["--case", "nothing", "--out", str(tmp_path)]) == 2
    assert "no case matches 'nothing'" in capsys.readouterr().err
    (tmp_path / "file").write_text("")
    assert jit_dispatch.main(["--out", str(tmp_path / "file" / "folder")]) == 2
    assert capsys.readouterr().err.startswith("profiling.jit_dispatch: ")


def test_split_adds_up_to_completion():
    ones = Quartiles(1.0, 1.0, 1.0)
    samples = Samples(dispatch_us=(20.0, 40.0, 30.0), completion_us=(30.0, 60.0, 45.0), calls=1)
    ours = Column("filter_jit", 30.0, 45.0, Quartiles(2.0, 3.0, 4.0), ones, samples)
    parts = jit_dispatch.split(ours)
    found = (parts.jax_us, parts.ours_us, parts.rest_us, parts.total_us)
    assert found == pytest.approx((10, 20, 15, 45))
