"""The tutorial on several devices, in a short form, on the two that the suite has."""

import re


def test_ways_to_train_come_to_the_same_and_hold_what_they_should(script, capsys):
    script("devices").main(["--steps", "3", "--width", "32"])
    _, one, parallel, split = capsys.readouterr().out.split("\n\n")

    def held(text):
        return int(re.findall(r"each device holds +([\d,]+)", text)[0].replace(",", ""))

    assert held(parallel) == held(one)
    assert held(one) / 2 < held(split) < 0.6 * held(one)
    assert "nothing" in one
    assert "all-reduce" in parallel
    assert "all-gather" in split
    for each in (one, parallel, split):
        (apart,) = re.findall(r"losses apart by +(\S+)", each)
        assert float(apart) < 1e-4
