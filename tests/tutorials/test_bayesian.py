"""The tutorial on Bayesian networks, in a short form."""

import pytest

from eqxlike import bayes


@pytest.fixture
def module(script, monkeypatch):
    module = script("bayesian")
    few = {
        "most probable": (module.UNKNOWN, bayes.MAP(steps=20)),
        "noise known": (module.NOISE, bayes.MAP(steps=20)),
    }
    monkeypatch.setattr(module, "methods", lambda steps, draws: few)
    monkeypatch.setattr(module, "HELD_OUT", 200)  # as many as places that are drawn
    return module


def test_each_method_has_a_line_and_a_panel(module, capsys, tmp_path, monkeypatch):
    panels, bands = [], bayes.plot.bands

    def drawn(*args, **options):
        panels.append(bands(*args, **options))

    monkeypatch.setattr(bayes.plot, "bands", drawn)
    module.main(["--width", "3", "--out", str(tmp_path / "bands.png")])
    lines = capsys.readouterr().out.splitlines()
    known, probable, given, flat = (line.split() for line in lines[-4:])
    assert float(known[4]) < float(flat[4])  # the NLL of the truth and of no network
    assert probable[:2] == ["most", "probable"]
    assert given[:2] == ["noise", "known"]
    assert given[-2] == "known"
    assert [axes.get_title() for axes in panels] == ["most probable", "noise known"]
    assert (tmp_path / "bands.png").stat().st_size > 0
