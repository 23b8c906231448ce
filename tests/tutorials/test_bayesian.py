"""The tutorial on Bayesian networks, in a short form."""

from eqxlike import bayes


def test_each_method_has_a_line(script, capsys, monkeypatch):
    module = script("bayesian")
    one = {"most probable": (module.UNKNOWN, bayes.MAP(steps=2))}
    monkeypatch.setattr(module, "methods", lambda steps, draws: one)
    monkeypatch.setattr(module, "HELD_OUT", 80)  # as many as for training, in the same programs
    module.main(["--width", "3"])
    lines = capsys.readouterr().out.splitlines()
    known, probable, flat = (line.split() for line in lines[-3:])
    assert float(known[4]) < float(flat[4])  # the NLL of the truth and of no network
    assert probable[:2] == ["most", "probable"]
