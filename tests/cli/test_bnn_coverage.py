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
    """Sets what the networks reach, without training them; None for a data set trains them."""
    train = script.metrics

    def set_metrics(*, coverage=None, nll=None):
        diabetes = {name: {"coverage": 0.9} for name in ("bayesian", "plain", "ridge")}
        digits = {name: {"nll": 0.07} for name in ("bayesian", "plain", "logistic")}
        diabetes["bayesian"] = {"coverage": coverage}
        digits["bayesian"] = {"nll": nll}
        found = {
            "diabetes": None if coverage is None else diabetes,
            "digits": None if nll is None else digits,
        }
        monkeypatch.setattr(
            script, "metrics", lambda name, seed, steps: found[name] or train(name, seed, steps)
        )

    return set_metrics


def test_table_has_a_line_for_each_seed_and_their_mean(script, with_metrics, capsys):
    with_metrics(nll=0.06)
    assert script.main(["--seeds", "1", "--steps", "30"]) in (0, 1)
    lines = capsys.readouterr().out.splitlines()
    for label in ("0", "mean"):
        (line,) = [line for line in lines if line.split()[0] == label]
        numbers = [float(number) for number in re.findall(r"\d\.\d{4}", line)]
        assert numbers[3:] == [0.06, 0.07, 0.07]
        assert all(0.5 < coverage <= 1 for coverage in numbers[:3])


@pytest.mark.parametrize(
    ("coverage", "nll", "status"),
    [(0.9, 0.06, 0), (0.9, 0.07, 0), (0.84, 0.06, 1), (0.96, 0.06, 1), (0.9, 0.08, 1)],
)
def test_status_says_whether_the_claims_hold(script, with_metrics, coverage, nll, status):
    with_metrics(coverage=coverage, nll=nll)
    assert script.main(["--seeds", "2"]) == status
