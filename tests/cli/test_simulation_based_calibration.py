"""The script that tries three methods on data whose truth is known, in a short form."""

import re

import numpy as np
import pytest

from eqxlike import bayes
from tests import scripts

PATH = scripts.EXAMPLES / "simulation_based_calibration.py"


@pytest.fixture(scope="module")
def script():
    return scripts.load(PATH)


def rows(output):
    """Method, unknown, counts and probability of each line."""
    pattern = r"(.{10})  (\w+) +\[([ \d]+)\]  p = (\S+)"
    found = [re.fullmatch(pattern, line) for line in output.splitlines()]
    return [
        (each[1].strip(), each[2], [*map(int, each[3].split())], float(each[4]))
        for each in found
        if each is not None
    ]


def test_ranks_of_each_method_are_counted_in_ten_bins(script, monkeypatch, capsys):
    even = np.arange(100)
    ranks = np.stack([even, np.full(100, 99), even // 2], axis=1)
    monkeypatch.setattr(bayes, "simulation_ranks", lambda *args, **kwargs: ranks)
    script.main([])
    lines = rows(capsys.readouterr().out)
    assert [line[:2] for line in lines] == [
        (method, unknown)
        for method in ("NUTS", "Laplace", "mean field")
        for unknown in ("slope", "intercept", "noise")
    ]
    (_, _, uniform, likely), (_, _, last, unlikely), (_, _, lower, _) = lines[:3]
    assert (uniform, likely) == ([10] * 10, 1)
    assert last == [0] * 9 + [100]
    assert unlikely < 1e-100
    assert lower == [20] * 5 + [0] * 5
