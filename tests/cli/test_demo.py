"""The demo in its short form, end to end."""

import contextlib
import dataclasses
import io
import json
import os
import signal
import sys
import types

import jax
import matplotlib.image
import numpy as np
import pytest

from eqxlike import __main__, bayes, train
from eqxlike._cli import _demo, _evaluate, _models, main
from eqxlike._cli._evaluate import METHODS
from eqxlike._cli._report import page_of

COLUMNS = {"jax.jit, flat list", "jax.jit, module", "filter_jit"}
PICTURES = {"diabetes_intervals.png", "digits_reliability.png", "elbo.png", "dispatch.png"}
TEXTS = {"results.json", "report.html"}


@pytest.fixture(scope="module", autouse=True)
def small():
    """Less to compile: linear models, and fewer penalties to choose from."""
    with pytest.MonkeyPatch.context() as patch:
        rates = {"diabetes": {}, "digits": {"learning_rate": 3e-2, "plain_learning_rate": 1e-2}}
        for name, changed in rates.items():
            settings = dataclasses.replace(_models.SETTINGS[name], depth=0, **changed)
            patch.setitem(_models.SETTINGS, name, settings)
        patch.setattr(_evaluate, "INVERSE_PENALTIES", _evaluate.INVERSE_PENALTIES[:2])
        yield


@pytest.fixture(scope="module")
def quick(tmp_path_factory):
    """One run over both data sets."""
    folder = tmp_path_factory.mktemp("demo") / "results"
    with (
        contextlib.redirect_stdout(io.StringIO()) as out,
        contextlib.redirect_stderr(io.StringIO()) as err,
    ):
        status = main(["demo", "--quick", "--seed", "1", "--out", str(folder)])
    results = json.loads((folder / "results.json").read_text())
    return types.SimpleNamespace(
        status=status, folder=folder, out=out.getvalue(), err=err.getvalue(), results=results
    )


def test_it_succeeds_and_names_its_files(quick):
    assert quick.status == 0
    assert quick.results["stopped"] == "finished"
    assert quick.out.startswith(f"device: {quick.results['device']}\n")
    assert f"digits, Bayesian: step {_models.QUICK_STEPS}/{_models.QUICK_STEPS}" in quick.err
    assert {path.name for path in quick.folder.iterdir()} == PICTURES | TEXTS
    for name in PICTURES | TEXTS:
        assert str(quick.folder / name) in quick.out
    for name in PICTURES:
        height, width, _ = matplotlib.image.imread(quick.folder / name).shape
        assert min(height, width) > 400
    for words in ("Bayesian MLP", "ridge regression", "logistic regression", *COLUMNS):
        assert words in quick.out


def test_page_is_that_of_the_results(quick):
    assert (quick.folder / "report.html").read_text(encoding="utf-8") == page_of(quick.results)


def test_intervals_and_bins_hold_as_many_truths_as_the_metrics_say(quick):
    data = quick.results["data"]["diabetes"]
    for name, predicted in data["intervals"].items():
        triples = zip(predicted["lower"], predicted["truth"], predicted["upper"], strict=True)
        inside = sum(lower <= truth <= upper for lower, truth, upper in triples)
        assert inside == round(data["metrics"][name]["coverage"] * data["examples"]["test"])
    digits = quick.results["data"]["digits"]
    for bins in digits["reliability"].values():
        assert sum(bins["count"]) == digits["examples"]["test"]


def test_report_says_what_was_run(quick):
    results = quick.results
    assert (results["seed"], results["quick"]) == (1, True)
    assert {"jax", "eqxlike", "python", "optax", "scikit-learn"} <= set(results["machine"])
    for data in results["data"].values():
        assert data["trainings"]["bayesian"]["steps"] == _models.QUICK_STEPS
        assert len(data["elbo"]) == data["settings"]["steps"] == _models.QUICK_STEPS
        assert sum(data["elbo"][-20:]) > sum(data["elbo"][:20])
        assert data["examples"]["test"] < data["examples"]["train"]


def test_metrics_are_sane_and_the_dispatch_table_is_complete(quick):
    metrics = quick.results["data"]["diabetes"]["metrics"]
    assert set(metrics) == {"bayesian", "plain", "ridge"}
    for model in metrics.values():
        # The target has a standard deviation of 77; the linear model's error is about 55.
        assert 40 < model["rmse"] < 70
        assert 5 < model["nll"] < 6
        assert 0.75 < model["coverage"] <= 1
        assert 100 < model["width"] < 300
    metrics = quick.results["data"]["digits"]["metrics"]
    assert set(metrics) == {"bayesian", "plain", "logistic"}
    for model in metrics.values():
        assert 0.9 < model["accuracy"] <= 1
        assert 0 < model["nll"] < 0.4
        assert 0 <= model["ece"] < 0.1
    table = quick.results["data"]["diabetes"]["dispatch"]
    assert set(table) == {"training step", "prediction"}
    for measured in table.values():
        assert set(measured["columns"]) == COLUMNS
        assert all(column["dispatch_us"] > 0 for column in measured["columns"].values())


def test_diverged_training_is_said_in_one_line_and_its_last_good_state_evaluated(
    tmp_path, capsys, monkeypatch
):
    batches_of = _models._batches

    def broken_after_three_steps(data, batch_size, seed):
        monkeypatch.setattr(_models, "_batches", batches_of)  # The next training is sound.
        for count, batch in enumerate(batches_of(data, batch_size, seed)):
            yield jax.tree.map(
                lambda array, count=count: array * (np.nan if count == 3 else 1), batch
            )

    monkeypatch.setattr(_models, "_batches", broken_after_three_steps)
    monkeypatch.setattr(_demo, "measure_dispatch", lambda *arguments: {})
    arguments = ["demo", "--data", "diabetes", "--quick", "--steps", "5", "--out", str(tmp_path)]
    assert main(arguments) == 1
    said = [line for line in capsys.readouterr().err.splitlines() if ": step " not in line]
    (line,) = said
    assert line.startswith(
        "diabetes, bayesian: The loss was nan in step 4; the state is that after"
    )
    results = json.loads((tmp_path / "results.json").read_text())
    data = results["data"]["diabetes"]
    assert results["stopped"] == "diverged"
    assert data["trainings"]["bayesian"]["stopped"] == "diverged"
    assert data["trainings"]["bayesian"]["steps"] == 3
    assert data["metrics"]["bayesian"]["rmse"] < 100


def test_interrupt_ends_cleanly_with_what_was_reached(tmp_path, capsys, monkeypatch):
    minibatches, ended = train.minibatches, []

    def interrupted_at_the_fifth(*arguments, **options):
        for index, batch in enumerate(minibatches(*arguments, **options)):
            if index == 4:
                signal.raise_signal(signal.SIGINT)
            yield batch

    monkeypatch.setattr(train, "minibatches", interrupted_at_the_fifth)
    # A process in the background of a shell ignores Ctrl-C, and so do those that it starts.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    monkeypatch.setattr(os, "_exit", ended.append)
    arguments = ["demo", "--data", "diabetes", "--quick", "--device", "cpu", "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["eqxlike", *arguments])
    try:
        __main__.run()
    finally:
        signal.signal(signal.SIGINT, before)
    assert ended == [130]
    out, err = capsys.readouterr()
    assert err.splitlines()[-1] == "interrupted: the results are those of what was reached"
    assert "device: cpu\n" in out
    assert str(tmp_path / "results.json") in out
    results = json.loads((tmp_path / "results.json").read_text())
    data = results["data"]["diabetes"]
    assert results["stopped"] == data["trainings"]["bayesian"]["stopped"] == "interrupted"
    assert 4 <= data["trainings"]["bayesian"]["steps"] <= 5
    assert set(data["trainings"]) == set(data["metrics"]) == {"bayesian"}
    assert data["metrics"]["bayesian"]["rmse"] < 100


def test_every_method_of_the_library_is_one_of_the_demo():
    made = {type(choice.make(_models.SETTINGS["digits"])) for choice in METHODS.values()}
    of_library = {
        each
        for each in vars(bayes).values()
        if isinstance(each, type) and issubclass(each, bayes.Method) and each is not bayes.Method
    }
    assert made == of_library
