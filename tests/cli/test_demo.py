"""The demo in its short form, end to end."""

import contextlib
import io
import json
import re
import signal
import subprocess
import sys
import types

import jax
import jax.numpy as jnp
import matplotlib.image
import optax
import pytest

from eqxlike import bayes, clear_caches
from eqxlike._cli import _demo, _dispatch, _pictures, _settings, main
from eqxlike._cli._methods import METHODS
from eqxlike._cli._page import page_of

COLUMNS = {"jax.jit, flat list", "jax.jit, module", "filter_jit"}
PICTURES = {"diabetes_intervals.png", "digits_reliability.png", "elbo.png", "dispatch.png"}
TEXTS = {"results.json", "report.html"}


@pytest.fixture(scope="module")
def quick(tmp_path_factory):
    """One run over both data sets; the dispatch table of the smaller network is enough."""

    def measure_dispatch(data, *arguments):
        return _dispatch.measure_dispatch(data, *arguments) if data.name == "diabetes" else {}

    folder = tmp_path_factory.mktemp("demo") / "results"
    with (
        pytest.MonkeyPatch.context() as patch,
        contextlib.redirect_stdout(io.StringIO()) as out,
        contextlib.redirect_stderr(io.StringIO()) as err,
    ):
        patch.setattr(_demo, "measure_dispatch", measure_dispatch)
        status = main(["demo", "--quick", "--seed", "1", "--out", str(folder)])
    results = json.loads((folder / "results.json").read_text())
    return types.SimpleNamespace(
        status=status, folder=folder, out=out.getvalue(), err=err.getvalue(), results=results
    )


def test_it_succeeds(quick):
    assert quick.status == 0
    assert quick.results["stopped"] == "finished"


def test_pictures_are_drawn(quick):
    assert {path.name for path in quick.folder.iterdir()} == PICTURES | TEXTS
    for name in PICTURES:
        height, width, _ = matplotlib.image.imread(quick.folder / name).shape
        assert min(height, width) > 400


def test_files_are_named_in_the_output(quick):
    for name in PICTURES | TEXTS:
        assert str(quick.folder / name) in quick.out


def test_page_is_that_of_the_results(quick):
    assert (quick.folder / "report.html").read_text(encoding="utf-8") == page_of(quick.results)


def test_intervals_hold_as_many_truths_as_the_coverage_says(quick):
    data = quick.results["data"]["diabetes"]
    for name, predicted in data["intervals"].items():
        triples = zip(predicted["lower"], predicted["truth"], predicted["upper"], strict=True)
        inside = sum(lower <= truth <= upper for lower, truth, upper in triples)
        assert inside == round(data["metrics"][name]["coverage"] * data["examples"]["test"])


def test_device_is_said_first(quick):
    assert quick.out.startswith(f"device: {quick.results['device']}\n")


def test_progress_is_lines_where_there_is_no_terminal(quick):
    steps = _settings.QUICK_STEPS
    assert f"digits, Bayesian: step {steps}/{steps}, loss" in quick.err


def test_report_says_what_was_run(quick):
    results = quick.results
    assert (results["seed"], results["quick"]) == (1, True)
    assert {"jax", "eqxlike", "python", "optax", "scikit-learn"} <= set(results["machine"])
    for data in results["data"].values():
        assert data["trainings"]["bayesian"]["steps"] == _settings.QUICK_STEPS
        assert len(data["elbo"]) == _settings.QUICK_STEPS
        assert data["settings"]["steps"] == _settings.QUICK_STEPS
        assert data["examples"]["test"] < data["examples"]["train"]


def test_elbo_rises(quick):
    for data in quick.results["data"].values():
        assert sum(data["elbo"][-20:]) > sum(data["elbo"][:20])


def test_regression_metrics_are_sane(quick):
    metrics = quick.results["data"]["diabetes"]["metrics"]
    assert set(metrics) == {"bayesian", "plain", "ridge"}
    for model in metrics.values():
        # The target has a standard deviation of 77; the linear model's error is about 55.
        assert 40 < model["rmse"] < 70
        assert 5 < model["nll"] < 6
        assert 0.75 < model["coverage"] <= 1
        assert 100 < model["width"] < 300


def test_classification_metrics_are_sane(quick):
    metrics = quick.results["data"]["digits"]["metrics"]
    assert set(metrics) == {"bayesian", "plain", "logistic"}
    for model in metrics.values():
        assert 0.9 < model["accuracy"] <= 1
        assert 0 < model["nll"] < 0.4
        assert 0 <= model["ece"] < 0.1


def test_reliability_counts_every_prediction(quick):
    digits = quick.results["data"]["digits"]
    for bins in digits["reliability"].values():
        assert sum(bins["count"]) == digits["examples"]["test"]


def test_dispatch_table_is_complete(quick):
    table = quick.results["data"]["diabetes"]["dispatch"]
    assert set(table) == {"training step", "prediction"}
    for measured in table.values():
        assert set(measured["columns"]) == COLUMNS
        for column in measured["columns"].values():
            assert column["dispatch_us"] > 0
            assert column["completion_us"] > 0


def test_tables_are_printed(quick):
    for words in ("Bayesian MLP", "plain MLP", "ridge regression", "logistic regression", "RMSE"):
        assert words in quick.out
    for column in COLUMNS:
        assert column in quick.out


def test_diverged_training_is_said_in_one_line_and_its_last_good_state_evaluated(
    tmp_path, capsys, monkeypatch
):
    def broken_after_three_steps(rate, steps):
        return lambda count: jnp.where(count < 3, rate, jnp.nan)

    monkeypatch.setattr(optax, "cosine_decay_schedule", broken_after_three_steps)
    monkeypatch.setattr(_demo, "measure_dispatch", lambda *arguments: {})
    arguments = ["demo", "--data", "diabetes", "--quick", "--steps", "5", "--out", str(tmp_path)]
    assert main(arguments) == 1
    said = [line for line in capsys.readouterr().err.splitlines() if ": step " not in line]
    (line,) = said
    assert line.startswith("diabetes, bayesian: A parameter, or what the optimiser or the model ")
    assert "became NaN or infinite in step 4" in line
    results = json.loads((tmp_path / "results.json").read_text())
    data = results["data"]["diabetes"]
    assert results["stopped"] == "diverged"
    assert data["trainings"]["bayesian"]["stopped"] == "diverged"
    assert data["trainings"]["bayesian"]["steps"] == 3
    assert data["metrics"]["bayesian"]["rmse"] < 100


def test_second_start_compiles_nothing_and_says_what_the_first_one_cost(
    tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr(_demo, "measure_dispatch", lambda *arguments: {})
    monkeypatch.setattr(_pictures, "draw", lambda *arguments: [])
    arguments = ["demo", "--data", "diabetes", "--quick", "--steps", "3", "--out", str(tmp_path)]
    said = []
    for _ in range(2):
        jax.clear_caches()
        clear_caches()
        assert main([*arguments, "--cache", str(tmp_path / "compiled")]) == 0
        said.append(capsys.readouterr().out.splitlines()[-1])
    first, second = (
        re.search(r"(\d+) programs? read in .*, which to compile took ([\d.]+) s; (\d+) ", line)
        for line in said
    )
    assert int(second[3]) == 0
    # Programs that are alike are read the second time they are met, also in the first run.
    assert int(second[1]) == int(first[1]) + int(first[3]) > 10
    assert float(second[2]) > 0


def test_cache_that_cannot_be_is_refused_in_one_line(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert main(["demo", "--quick", "--cache", str(tmp_path / "file")]) == 2
    assert "give another folder" in capsys.readouterr().err


# The parent may have been started with SIGINT ignored, as shells do in the background.
COMMAND = """
import runpy, signal
signal.signal(signal.SIGINT, signal.default_int_handler)
runpy.run_module("eqxlike", run_name="__main__")
"""


def interrupt_after(line, steps, folder):
    """Interrupts the demo once it has printed a line that begins so; its status and output."""
    arguments = ["demo", "--data", "diabetes", "--steps", str(steps), "--out", str(folder)]
    process = subprocess.Popen(
        [sys.executable, "-c", COMMAND, *arguments, "--device", "cpu"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stderr is not None
        assert any(printed.startswith(line) for printed in process.stderr)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=300)
    finally:
        process.kill()
    return process.returncode, out, err


def test_interrupt_after_training_ends_with_its_status(tmp_path):
    # What comes next is compiled: JAX crashes Python at its end if that is broken off.
    status, _, err = interrupt_after("diabetes, Bayesian: step 5/5", 5, tmp_path)
    assert status == 130, err


def test_interrupt_ends_cleanly_with_what_was_reached(tmp_path):
    line = "diabetes, Bayesian: step 4000/20000, loss"
    status, out, err = interrupt_after(line, 20_000, tmp_path)
    assert status == 130, err
    assert "Traceback" not in err
    assert err.splitlines()[-1] == "interrupted: the results are those of what was reached"
    assert "device: cpu\n" in out
    assert str(tmp_path / "results.json") in out
    results = json.loads((tmp_path / "results.json").read_text())
    training = results["data"]["diabetes"]["trainings"]["bayesian"]
    assert results["stopped"] == training["stopped"] == "interrupted"
    assert 4000 <= training["steps"] < 20000
    assert results["data"]["diabetes"]["metrics"]["bayesian"]["rmse"] < 100


def test_methods_stand_beside_the_networks(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(_demo, "measure_dispatch", lambda *arguments: {})
    arguments = ["--data", "diabetes", "--quick", "--steps", "100", "--out", str(tmp_path)]
    methods = ["--method", "ensemble", "--method", "mc-dropout", "--method", "ensemble"]
    assert main(["demo", *arguments, *methods]) == 0
    metrics = json.loads((tmp_path / "results.json").read_text())["data"]["diabetes"]["metrics"]
    assert set(metrics) == {"bayesian", "plain", "ridge", "ensemble", "mc-dropout"}
    for name in ("ensemble", "mc-dropout"):
        assert 40 < metrics[name]["rmse"] < 80
        assert metrics[name]["seconds"] > 0
    out = capsys.readouterr().out
    assert "deep ensemble" in out
    assert "MC dropout" in out


def test_every_method_of_the_library_is_one_of_the_demo():
    made = {type(choice.make(_settings.SETTINGS["digits"])) for choice in METHODS.values()}
    of_library = {
        each
        for each in vars(bayes).values()
        if isinstance(each, type) and issubclass(each, bayes.Method) and each is not bayes.Method
    }
    assert made == of_library


def test_unknown_method_is_refused_with_the_names_of_all(capsys):
    assert main(["demo", "--method", "gibbs"]) == 2
    assert "invalid choice: 'gibbs'" in capsys.readouterr().err
