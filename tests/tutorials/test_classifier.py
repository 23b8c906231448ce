"""The tutorial on a classifier, in a short form."""

import re


def test_interrupted_run_goes_on_to_the_same_bits(script, capsys, monkeypatch):
    module = script("classifier")
    monkeypatch.setattr(module, "EVALUATE_EVERY", 2)
    module.main(["--steps", "4"])
    output = capsys.readouterr().out
    assert "goes on after step 2" in output
    assert "The same bits: True" in output
    assert len(re.findall(r"(\d+\.\d)%", output.splitlines()[-1])) == 2
