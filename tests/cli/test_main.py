"""Wrong arguments print one line on standard error and exit with status 2."""

import os
import sys

import pytest

from eqxlike import __main__, __version__
from eqxlike.__main__ import main


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["demo", "--quick"], "the demo is in examples/demo of the repository: run `make demo`"),
        (["nonsense"], "argument command: invalid choice: 'nonsense'"),
        (["profile"], "the following arguments are required: module:function"),
        (["profile", "a:b", "--calls", "0"], "--calls: must be an integer of at least 1, got '0'"),
    ],
)
def test_wrong_arguments_print_one_line(arguments, said, capsys):
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    assert said in err
    assert (out, err.count("\n")) == ("", 1)


def test_version(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"{__version__}\n"


def test_interrupt_ends_the_process_with_status_130(monkeypatch, tmp_path, capsys):
    (tmp_path / "interrupted_script.py").write_text("def step(): raise KeyboardInterrupt")
    ended = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "argv", ["eqxlike", "profile", "interrupted_script:step"])
    monkeypatch.setattr(os, "_exit", ended.append)
    __main__.run()
    sys.modules.pop("interrupted_script")
    assert ended == [130]
    assert capsys.readouterr().err == "python -m eqxlike: interrupted\n"
