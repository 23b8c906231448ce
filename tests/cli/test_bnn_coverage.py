"""The script behind the claim over five seeds, in a short form."""

import re

import pytest

from tests import scripts

PATH = scripts.EXAMPLES / "bnn_coverage.py"


@pytest.fixture(scope="module")
def script():
    return scripts.load(PATH)


@pytest.fixture
def with_metrics(script, monkeypatch):
    """Sets what the networks reach, without training them."""

    def set_metrics(coverage, nll):
        diabetes = {name: {"coverage": 0.9} for name in ("bayesian", "plain", "ridge")}
        digits = {name: {"nll": 0.07} for name in ("bayesian", "plain", "logistic")}
        diabetes["bayesian"] = {"coverage": coverage}
        digits["bayesian"] = {"nll": nll}
        found = {"diabetes": diabetes, "digits": digits}
        monkeypatch.setattr(script, "metrics", lambda name, seed, steps: found[name])

    return set_metrics


@pytest.mark.parametrize(
    ("coverage", "nll", "status"),
    [(0.9, 0.06, 0), (0.9, 0.07, 0), (0.84, 0.06, 1), (0.96, 0.06, 1), (0.9, 0.08, 1)],
)
def test_status_says_whether_the_claims_hold(script, with_metrics, coverage, nll, status, capsys):
    with_metrics(coverage, nll)
    assert script.main(["--seeds", "2"]) == status
    (mean,) = [line for line in capsys.readouterr().out.splitlines() if line.split()[0] == "mean"]
    numbers = [float(number) for number in re.findall(r"\d\.\d{4}", mean)]
    assert numbers == [coverage, 0.9, 0.9, nll, 0.07, 0.07]
