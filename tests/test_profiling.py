"""The profiler writes its files and attributes samples as it says. No test looks at a clock."""

import json
import pathlib

import jax
import pytest

pytest.importorskip("pyinstrument")

from pyinstrument.session import Session

import eqxlike
from benchmarks import cases
from eqxlike._timing import Column, Quartiles, Samples
from profiling import jit_dispatch, sessions

EQXLIKE = f"{pathlib.Path(eqxlike.__file__).parent}/_transforms/_jit/_filter_jit.py"
JAX = f"{pathlib.Path(jax.__file__).parent}/_src/pjit.py"
SCRIPT = "/home/somebody/train.py"
LIBRARY = "/usr/lib/python3.11/inspect.py"


def stack(*frames):
    """A stack as pyinstrument writes it, from (function, file, line), outermost first."""
    thread = "MainThread\x00<thread>\x001"
    texts = [f"{name}\x00{file}\x00{line}\x01l{line + 1}" for name, file, line in frames]
    return [thread, *texts]


LOOP = ("loop", SCRIPT, 1)
WRAPPER = ("wrapper", EQXLIKE, 10)


@pytest.mark.parametrize(
    ("frames", "function", "owner"),
    [
        ([LOOP], "loop", sessions.OTHER),
        ([LOOP, WRAPPER], "wrapper", sessions.OURS),
        ([LOOP, WRAPPER, ("rebuild", "<eqxlike rebuild MLP>", 1)], "rebuild", sessions.OURS),
        ([LOOP, WRAPPER, ("cache_miss", JAX, 5)], "cache_miss", sessions.JAX),
        ([LOOP, WRAPPER, ("bind", LIBRARY, 5)], "wrapper", sessions.OURS),
        ([LOOP, WRAPPER, ("PjitFunction", "<built-in>", 0)], "wrapper", sessions.OURS),
        ([LOOP, ("block_until_ready", "<built-in>", 0)], "loop", sessions.OTHER),
        ([("outer", SCRIPT, 1), ("loop", SCRIPT, 9)], "loop", sessions.OTHER),
        ([WRAPPER, ("f", "/site-packages/eqxlike_extras/a.py", 1)], "wrapper", sessions.OURS),
    ],
)
def test_sample_belongs_to_the_innermost_frame_of_ours_or_jax(frames, function, owner):
    found = sessions.innermost(stack(*frames))
    assert (found.function, found.owner) == (function, owner)


def test_stack_of_the_thread_alone_belongs_to_nobody():
    assert sessions.innermost(stack()) is None


def session(records):
    return Session.from_json(
        {
            "frame_records": records,
            "start_time": 0.0,
            "duration": sum(seconds for _, seconds in records),
            "sample_count": len(records),
            "start_call_stack": stack(),
            "target_description": "test",
            "cpu_time": 0.0,
        }
    )


def test_self_times_add_up_over_samples():
    one = session([(stack(LOOP), 1.0), (stack(LOOP, WRAPPER), 2.0), (stack(LOOP, WRAPPER), 5.0)])
    times = sessions.self_times(one)
    assert {frame.function: seconds for frame, seconds in times.items()} == {
        "loop": 1.0,
        "wrapper": 7.0,
    }
    assert sessions.shares(times) == {
        sessions.OURS: 7 / 8,
        sessions.JAX: 0.0,
        sessions.OTHER: 1 / 8,
    }


def test_no_samples_have_no_shares():
    assert set(sessions.shares({}).values()) == {0.0}


def test_text_tree_shows_hidden_frames():
    hidden = "hidden\x00/a.py\x001\x01h1"
    tree = sessions.render_text(session([([*stack(LOOP), hidden], 1.0), (stack(LOOP), 1.0)]))
    assert "hidden" in tree
    assert "loop" in tree


def test_split_adds_up_to_completion():
    ones = Quartiles(1.0, 1.0, 1.0)
    samples = Samples(dispatch_us=(20.0, 40.0, 30.0), completion_us=(30.0, 60.0, 45.0), calls=1)
    ours = Column("filter_jit", 30.0, 45.0, Quartiles(2.0, 3.0, 4.0), ones, samples)
    parts = jit_dispatch.split(ours)
    assert parts.jax_us == pytest.approx(10)
    assert parts.ours_us == pytest.approx(20)
    assert parts.rest_us == pytest.approx(15)
    assert parts.total_us == pytest.approx(45)


def test_profiler_writes_a_tree_a_page_and_the_session(tmp_path, capsys):
    out = tmp_path / "made"
    assert jit_dispatch.main(["--case", "^identity", "--out", str(out), "--calls", "2000"]) == 0
    printed = capsys.readouterr().out
    assert "Identity, (1, 1)" in printed
    assert "jax.jit" in printed
    name = cases.identity().slug
    assert {path.name for path in out.iterdir()} == {
        f"{name}.txt",
        f"{name}.html",
        f"{name}.pyisession",
    }
    assert "sample" in (out / f"{name}.txt").read_text()
    assert "<html>" in (out / f"{name}.html").read_text()
    loaded = Session.load(out / f"{name}.pyisession")
    assert sessions.self_times(loaded)
    assert json.loads((out / f"{name}.pyisession").read_text())["frame_records"]


def test_default_cases_exist():
    found = [case.name for case in cases.select(jit_dispatch.DEFAULT)]
    assert found[0].startswith("Identity")
    assert len(found) == 6


def test_wrong_case_and_unwritable_folder_are_one_message(capsys, tmp_path):
    assert jit_dispatch.main(["--case", "nothing", "--out", str(tmp_path)]) == 2
    assert "no case matches 'nothing'" in capsys.readouterr().err
    (tmp_path / "file").write_text("")
    assert jit_dispatch.main(["--out", str(tmp_path / "file" / "folder")]) == 2
    assert capsys.readouterr().err.startswith("profiling.jit_dispatch: ")


def test_ctrl_c_prints_the_cases_that_are_finished(monkeypatch, capsys, tmp_path):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(jit_dispatch, "profile", interrupted)
    assert jit_dispatch.main(["--case", "^identity", "--out", str(tmp_path)]) == 130
    assert "interrupted" in capsys.readouterr().err
