"""The tutorial on low-rank adaptation, in a short form."""

import re


def test_factors_change_few_numbers_and_are_taken_out_again(script, capsys):
    script("lora").main(["--steps", "150", "--ranks", "2"])
    output = capsys.readouterr().out
    rows = {
        name: (int(trained.replace(",", "")), float(turned), float(upright))
        for name, trained, turned, upright in re.findall(
            r"^(\S.*?) +([\d,]+) +([\d.]+)% +([\d.]+)%$", output, re.MULTILINE
        )
    }
    was, factors = rows["as it was"], rows["factors of rank 2"]
    # Two factors beside each of the weights (256, 64), (256, 256) and (10, 256).
    assert (was[0], factors[0]) == (0, 2 * (256 + 64 + 256 + 256 + 10 + 256))
    assert was[2] > 80
    assert factors[1] > was[1] + 30
    assert "Merged: MergedLinear" in output
    assert "Taken out again, the first network: True" in output
