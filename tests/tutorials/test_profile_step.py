"""The tutorial on profiling a step, in a short form: what is found and counted, and no time."""

import re

import pytest


def test_each_cost_is_found_and_mended(script, capsys):
    script("profile_step").main(["--steps", "8", "--chunk", "4"])
    output = capsys.readouterr().out
    assert "trace 2, for rate: 1.0 -> 0.98" in output
    assert "each new number is compiled for" in output
    assert "copies to the device: batch[0], batch[1]" in " ".join(output.split())
    assert "With batches on the device: nothing." in output
    rows = {
        name: (int(calls), int(traces))
        for name, calls, traces in re.findall(
            r"^  (\S.*?) {2,}(\d+) +(\d+) +[\d.]+ +[\d.]+ +(?:-|\d+)$", output, re.MULTILINE
        )
    }
    assert rows == {
        "as it came": (8, 8),
        "the rate inside": (8, 1),
        "batches on the device": (8, 1),
        "4 steps a call": (2, 1),
    }
    (off,) = re.findall(r"Weights differ by (\S+) at most", output)
    assert float(off) < 1e-5


def test_chunks_that_do_not_divide_the_steps_are_refused(script, capsys):
    with pytest.raises(SystemExit):
        script("profile_step").main(["--steps", "9", "--chunk", "4"])
    assert "--steps must be a multiple of --chunk; it is 9, and that 4." in capsys.readouterr().err
