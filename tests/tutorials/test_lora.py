"""The tutorial on low-rank adaptation, in a short form."""

import re


def test_factors_change_few_numbers_and_are_taken_out_again(script, capsys, monkeypatch):
    module = script("lora")
    monkeypatch.setattr(module, "WIDTH", 16)
    module.main(["--steps", "2", "--ranks", "2"])
    output = capsys.readouterr().out
    trained = dict(re.findall(r"^(\S.*?) {2,}([\d,]+)(?: +[\d.]+%){2}$", output, re.MULTILINE))
    # Two factors beside each of the weights (16, 64), (16, 16) and (10, 16).
    assert trained == {
        "as it was": "0",
        "new readout": "170",
        "all weights": "1,482",
        "factors of rank 2": str(2 * (16 + 64 + 16 + 16 + 10 + 16)),
    }
    assert "Merged: MergedLinear" in output
    assert "Taken out again, the first network: True" in output
