"""`python -m eqxlike profile`. No test uses a clock."""

import json
import re
import sys

import pytest

from eqxlike.__main__ import main

pytest.importorskip("pyinstrument")

SCRIPT = """
import eqxlike as eqx
import jax.numpy as jnp

x = jnp.ones(3)
lines = 3


@eqx.filter_jit
def double(x):
    return 2 * x


class Training:
    @staticmethod
    def step():
        return double(x)


def step():
    return double(x)


def with_arguments(model, *args, rate, seed=0):
    return double(model)


def failing():
    return double(x, x)


batches = [x]


def exhausted():
    return double(batches.pop())


def exiting():
    raise SystemExit(3)
"""


@pytest.fixture
def script(tmp_path, monkeypatch):
    """Changes to a directory with a module, and returns the directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "profiled_script.py").write_text(SCRIPT)
    yield tmp_path
    sys.modules.pop("profiled_script", None)


def test_table_and_files_of_a_function(script, capsys):
    target = "profiled_script:Training.step"
    assert main(["profile", target, "--calls", "20", "--out", "made"]) == 0
    printed = capsys.readouterr().out
    header, row = printed.splitlines()[1:3]
    assert header.split()[:4] == ["Function", "Calls", "Traces", "Compiling,"]
    assert row.split()[:3] == ["profiled_script.double", "20", "1"]
    stages = r"the import: traced \d.\d+ s, lowered \d.\d+ s, compiled \d.\d+ s, [1-9]\d* programs"
    assert re.search(stages, printed)
    assert "sampled: eqxlike " in printed
    stem = "profiled_script.Training.step"
    names = {path.name for path in (script / "made").iterdir()}
    assert names == {f"{stem}{suffix}" for suffix in (".txt", ".html", ".pyisession")}
    assert json.loads((script / "made" / f"{stem}.pyisession").read_text())["frame_records"]


def test_trace_of_xla_is_optional(script, capsys):
    assert main(["profile", "profiled_script.py:step", "--calls", "2", "--trace"]) == 0
    assert "perfetto_trace.json.gz" in capsys.readouterr().out.splitlines()[-1]
    assert list((script / "profile-results").glob("**/*.xplane.pb"))


@pytest.mark.parametrize(
    ("target", "said"),
    [
        ("nowhere:step", "ModuleNotFoundError: No module named 'nowhere'"),
        ("folder/nowhere.py:step", "give module:function, such as train:step; importing "),
        ("profiled_script:stepp", "module 'profiled_script' has no attribute 'stepp'"),
        ("profiled_script", "module 'profiled_script' has no attribute 'function'"),
        ("profiled_script:lines", "without arguments, 3 is not a callable object"),
        ("profiled_script:with_arguments", "required argument: 'model': give a function without"),
        ("broken_script:step", "ModuleNotFoundError: No module named 'not_there'"),
        ("wrong_script:step", "ZeroDivisionError: division by zero"),
        ("ending_script:step", "raised SystemExit: 0"),
    ],
)
def test_wrong_target_is_one_line(script, capsys, target, said):
    (script / "broken_script.py").write_text("import not_there")
    (script / "wrong_script.py").write_text("1 / 0")
    (script / "ending_script.py").write_text("raise SystemExit(0)")
    assert main(["profile", target]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("failing", "TypeError: "),
        ("exhausted", "IndexError: pop from empty list"),
        ("exiting", "SystemExit: 3"),
    ],
)
def test_last_line_names_the_error_of_the_function(script, capsys, name, error):
    assert main(["profile", f"profiled_script:{name}", "--out", "made"]) == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith(f"python -m eqxlike: error: profiled_script:{name} raised {error}")


def test_missing_pyinstrument_and_unwritable_folder_are_refused(script, capsys, monkeypatch):
    (script / "file").write_text("")
    assert main(["profile", "profiled_script:step", "--out", "file/made"]) == 2
    assert "argument --out: cannot write to 'file/made'" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "pyinstrument", None)
    assert main(["profile", "profiled_script:step"]) == 2
    assert "pip install 'eqxlike[profile]'" in capsys.readouterr().err
