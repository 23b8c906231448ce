"""The tutorial on a classifier, in a short form."""

import re

import pytest


@pytest.fixture
def short(script, monkeypatch):
    module = script("classifier")
    monkeypatch.setattr(module, "EVALUATE_EVERY", 20)
    return module


def test_interrupted_run_goes_on_to_the_same_bits(short, capsys):
    short.main(["--steps", "80"])
    output = capsys.readouterr().out
    assert "goes on after step 40" in output
    assert "The same bits: True" in output
    held_out, linear = (float(each) for each in re.findall(r"(\d+\.\d)%", output)[-2:])
    assert held_out > 70
    assert linear > 90


def test_folder_keeps_what_the_next_start_goes_on_from(short, capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(short, "logistic_regression", lambda: 0.9)
    short.main(["--steps", "20", "--folder", str(tmp_path)])
    short.main(["--steps", "21", "--folder", str(tmp_path)])
    assert "goes on after step 20" in capsys.readouterr().out
