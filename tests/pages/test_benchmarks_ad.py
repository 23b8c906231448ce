"""The benchmark of differentiation modes: its models equal NumPyro's. No test uses a clock."""

import dataclasses

import jax
import numpy as np
import pytest

from benchmarks import ad_modes, ad_peers, ad_tables, zoo
from benchmarks.zoo import bayesian, bayesian_network, in_numpyro
from benchmarks.zoo.problem import by_path, in_all_spaces
from eqxlike import ad

# If a model has a linked space, only this space is tested: it includes the standard density.
OF_OTHER_WIDTHS = {*map(bayesian_network.name, bayesian_network.WIDTHS[1:])}
OF_NUMPYRO = [
    [*in_all_spaces(problem)][-1]
    for problem in zoo.PROBLEMS
    if problem.name in in_numpyro.MODELS.keys() - OF_OTHER_WIDTHS
]


def named(problem):
    return f"{problem.name}, {problem.space}"


pytestmark = pytest.mark.usefixtures("promotion")


@pytest.mark.parametrize("problem", OF_NUMPYRO, ids=named)
def test_log_density_equals_numpyro(problem):
    unknowns, data = problem.start()

    @jax.jit
    def both(unknowns, data):
        theirs = in_numpyro.value(problem)(by_path(unknowns), data)
        return problem.function(unknowns, data), theirs

    np.testing.assert_allclose(*both(unknowns, data), rtol=1e-5)


def test_command_prints_the_rows_that_it_writes(monkeypatch, report_of, capsys):
    monkeypatch.setattr(ad_modes, "modes_for", lambda problem: ({"Reverse": ad.Reverse()}, []))
    written = report_of(ad_modes, "--models", "^logistic", "--rounds", "1")
    assert written["is_complete"]
    (row,) = written["rows"]
    assert (row["name"], row["space"], row["unknowns"]) == ("logistic regression", "standard", 9)
    printed = capsys.readouterr().out
    assert printed.strip() == ad_tables.render(written, markdown=False)
    assert "- reached: every JAX mode is ok on every model: 2 of 2" in printed


def test_failing_or_wrong_peer_does_not_stop_the_others(monkeypatch):
    problem = bayesian.dirichlet_categorical()

    def wrong(problem):
        right = ad_peers.on_flat_arrays(problem)
        return dataclasses.replace(
            right, by_path=lambda returned: {"probabilities": 2 * returned[1][0]}
        )

    def raising(error):
        def make(problem):
            raise error

        return make

    peers = {
        "wrong": wrong,
        "failing": raising(RuntimeError("no memory")),
        "missing": raising(ImportError("No module named 'peer'")),
        "elsewhere": raising(LookupError("not stated")),
    }
    monkeypatch.setattr(ad_peers, "PEERS", peers)
    rows, notes = ad_peers.peer_rows(problem, rounds=1)
    assert [(row.mode, row.verdict, row.explanation) for row in rows] == [
        ("wrong", "wrong", "the gradient of probabilities is off by 1.0e+00, more than 0.0001"),
        ("failing", "error", "RuntimeError: no memory"),
    ]
    assert notes == ["missing is left out: No module named 'peer'"]


def mode_row(mode, **fields):
    row = {"mode": mode, "verdict": "ok", "gradient_us": 10.0, "ratio": 2.0, "peak_bytes": 100}
    return row | fields


def test_targets_name_the_worst_rows():
    modes = [
        mode_row("Reverse", ratio=3.0),
        mode_row("Auto", gradient_us=12.0),
        mode_row("Forward", verdict="wrong", gradient_us=1.0, peak_bytes=601),
        mode_row("Forward(64)", peak_bytes=64),
    ]
    peers = [
        {"mode": ad_peers.OURS, "to_ours": 1.0},
        {"mode": ad_peers.FLAT, "to_ours": 0.8},
        {"mode": ad_peers.NUMPYRO, "to_ours": 1.6},
    ]
    name = "Bayesian network"
    row = {"name": name, "space": "linked", "unknowns": 601, "modes": modes, "peers": peers}
    report = {
        "rows": [row],
        "others": {"checkpointed": 0.4, "parallel primal": 1.3, "parallel gradient": 1.3},
    }
    assert [(each.found, each.is_reached) for each in ad_tables.targets(report)] == [
        ("3 of 4, not Bayesian network, linked by Forward: wrong", False),
        ("3.00 (Bayesian network, linked)", False),
        ("1.20 (Bayesian network, linked)", False),
        ("1.25 (Bayesian network, linked)", False),
        ("0.62 (Bayesian network, linked)", True),
        ("0.50 (Bayesian network, linked)", True),
        ("1.00 (Bayesian network, linked)", True),
        ("0.40 (temporary memory)", True),
        ("1.30 (primal)", False),
        ("1.00 (of their ratios)", True),
    ]
