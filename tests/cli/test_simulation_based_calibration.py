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


def test_short_run_draws_a_panel_for_each_unknown(script, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(script, "METHODS", {"most probable": bayes.MAP(steps=5)})
    panels, draw = [], bayes.plot.sbc_ranks

    def drawn(*args, **options):
        panels.append(draw(*args, **options))

    monkeypatch.setattr(bayes.plot, "sbc_ranks", drawn)
    script.main(["--simulations", "2", "--out", str(tmp_path / "ranks.png")])
    unknowns = ["slope", "intercept", "noise"]
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[2] for line in lines] == unknowns
    assert [axes.get_title() for axes in panels] == [f"most probable: {each}" for each in unknowns]
    # A rank of one point is none or all 99 draws.
    for axes in panels:
        heights = [bar.get_height() for bar in axes.patches]
        assert (heights[0] + heights[-1], sum(heights)) == (2, 2)
    assert (tmp_path / "ranks.png").stat().st_size > 0
