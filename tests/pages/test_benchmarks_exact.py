"""The benchmark of exactness: references, ratios and table. No test runs a long chain."""

import json
import types

import jax
import jax.random as jr
import numpy as np
import pytest

from benchmarks import ages, exactness
from benchmarks.exactness import PROBLEMS, SHORT, reference, standard_deviations
from eqxlike import bayes


@pytest.fixture
def closed(monkeypatch):
    """Keeps the compiled programs of other tests, and clears the cache of exact answers."""
    monkeypatch.setattr(jax, "clear_caches", lambda: None)
    monkeypatch.setattr(exactness.eqxlike, "clear_caches", lambda: None)
    exactness.known.cache_clear()


def test_features_give_the_posterior_of_the_process_with_their_kernel():
    problem = PROBLEMS["Gaussian process"]()
    target = problem.target(jr.key(0))
    features = jax.vmap(target.network[0])
    noise, x = 0.2, target.data[0]
    for inputs, found in zip((problem.near, problem.far), problem.closed_form, strict=False):
        ours, theirs = np.asarray(features(inputs), float), np.asarray(features(x), float)
        kernel, cross, prior = theirs @ theirs.T, ours @ theirs.T, ours @ ours.T
        noisy = kernel + noise**2 * np.eye(len(x))
        covariance = prior - cross @ np.linalg.solve(noisy, cross.T)
        np.testing.assert_allclose(found, np.sqrt(np.diag(covariance)), rtol=1e-3)
    # Far from the data the posterior is nearly the prior.
    assert problem.closed_form.near.mean() < 0.2
    assert problem.closed_form.far.mean() > 0.7


def test_problems_have_the_expected_numbers_of_unknowns():
    sizes = {}
    for name, make in PROBLEMS.items():
        problem = make()
        sizes[name] = bayes.Problem(problem.target(jr.key(0))).size
        assert len(problem.near) == len(problem.far) == 20
    assert list(sizes) == [
        "linear regression",
        "Gaussian process",
        "logistic regression",
        "network",
    ]
    assert list(sizes.values()) == [4, 100, 3, 21]


def test_logits_of_two_classes_have_standard_deviations(monkeypatch):
    logits = np.array([[1.0, 2.0], [3.0, -2.0]], np.float32)
    prediction = bayes.CategoricalMixture(np.stack([0 * logits, logits], axis=-1))
    monkeypatch.setattr(bayes, "predict", lambda *args, **kwargs: prediction)
    np.testing.assert_allclose(standard_deviations(None, None, None), [1.0, 2.0])


def test_chains_are_the_reference_without_a_closed_form():
    exact = PROBLEMS["linear regression"]()
    found = reference(exact._replace(closed_form=None), SHORT)
    for ours, theirs in zip(found[:2], exact.closed_form, strict=False):
        np.testing.assert_allclose(ours, theirs, rtol=0.25)
    assert found.r_hat < 1.1
    assert reference(exact, SHORT) is exact.closed_form


def test_command_finds_laplace_exact_for_a_linear_model(closed, report_of, capsys):
    report = report_of(exactness, "--quick", "--problems", "linear", "--methods", "full")
    (laplace,) = report["rows"]
    np.testing.assert_allclose([laplace["near"], laplace["far"]], 1, rtol=1e-3)
    assert report["folders"] == ["eqxlike/bayes"]
    assert capsys.readouterr().out == exactness.render(report, markdown=False) + "\n"
    assert exactness.main(["--methods", "none of them"]) == 2


def row(problem, method, near, far, r_hat=None):
    reference = {"is_closed_form": r_hat is None, "reference_r_hat": r_hat, "notes": []}
    return reference | {"problem": problem, "method": method, "near": near, "far": far}


def test_table_has_geometric_means_and_targets_name_the_worst():
    rows = [
        row("a", "NUTS", [0.98], [1.01]),
        row("a", "SWAG", [0.5, 2.0], [0.0, 1.0]),
        row("b", "NUTS", [1.2], [1.0], r_hat=1.02),
    ]
    assert exactness.cells(rows) == [
        ["", "a, near", "a, far", "b, near", "b, far"],
        ["NUTS", "0.98", "1.01", "1.20", "1.00"],
        ["SWAG", "1.00", "0.00", "", ""],
    ]
    assert [(each.found, each.is_reached) for each in exactness.targets_of(rows)] == [
        ("0.02 (a, near)", True),
        ("1.02 (b)", False),
    ]


# --- the ages of reports ---


class Repository:
    """Replaces the `git` command in a repository with these commits."""

    def __init__(self, *commits, is_dirty=False):
        self.commits, self.is_dirty = commits, is_dirty

    def __call__(self, command, **kwargs):
        assert kwargs["cwd"] == ages.ROOT
        known, output = bool(self.commits), ""
        match command[1:]:
            case ["rev-parse", "HEAD"] if known:
                output = self.commits[-1]
            case ["status", *_, folder]:
                output = f" M {folder}/a.py" if self.is_dirty else ""
            case ["rev-list", "--count", span, "--", "eqxlike"]:
                first = span.removesuffix("..HEAD")
                known = first in self.commits
                output = str(len(self.commits) - 1 - self.commits.index(first)) if known else ""
        return types.SimpleNamespace(returncode=0 if known else 128, stdout=f"{output}\n")


def test_age_of_a_report_is_the_number_of_later_commits(monkeypatch):
    monkeypatch.setattr(ages.subprocess, "run", Repository("first", "second"))
    assert ages.measured() == {"commit": "second", "folders": ["eqxlike"]}
    report = {"commit": "first", "folders": ["eqxlike"]}
    assert (ages.age(report), ages.age(report | {"commit": "second"})) == (1, 0)
    assert ages.described(report) == "commit first, 1 later commit to eqxlike"
    # The history does not contain the commit.
    assert ages.described(report | {"commit": "elsewhere"}) == "commit elsewhere"
    assert ages.described({}) == "commit not recorded"


def test_changed_files_and_a_missing_repository_are_recorded(monkeypatch):
    monkeypatch.setattr(ages.subprocess, "run", Repository("first", "second", is_dirty=True))
    report = ages.measured()
    assert report["commit"] == "second dirty"
    assert ages.described(report) == "commit second with changes, 0 later commits to eqxlike"
    monkeypatch.setattr(ages.subprocess, "run", Repository())
    assert ages.measured()["commit"] == "unknown"

    def no_git(*args, **kwargs):
        raise FileNotFoundError("git")

    monkeypatch.setattr(ages.subprocess, "run", no_git)
    assert ages.measured()["commit"] == "unknown"
    assert ages.age(report) is None


def test_old_reports_are_listed(monkeypatch, tmp_path, capsys):
    folder = tmp_path / "benchmarks" / "results"
    folder.mkdir(parents=True)
    for name, commit in [("old", {"commit": "a"}), ("new", {"commit": "b"}), ("before", {})]:
        report = {"machine": {"date": "2026-01-02T03:04:05"}, "folders": ["eqxlike"]} | commit
        (folder / f"{name}.json").write_text(json.dumps(report))
    monkeypatch.setattr(ages, "ROOT", tmp_path)
    monkeypatch.setattr(ages, "age", lambda report: {"a": 21, "b": 20}.get(report.get("commit")))
    assert ages.main() == 0
    assert capsys.readouterr().out.startswith("old.json: 2026-01-02, commit a, 21 later commits")
