"""The tutorial on export, in a short form."""

import re


def test_other_process_computes_the_same(script, capsys):
    script("export_model").main(["--steps", "2"])
    output = capsys.readouterr().out
    here, there = re.findall(r"([\d.]+%) (?:of held-out digits )?are right", output)
    assert here == there
    (off,) = re.findall(r"differ by (\S+) at most", output)
    assert float(off) < 1e-5
    assert "Exported: predict(pixels: uint8[batch, 64]) -> float32[batch, 10]" in output
    assert "a fresh model: the same True" in output
    assert "A wrong input: pixels must be uint8[batch, 64]; it is uint8[500, 63]." in output
    assert "is cut off" in output
