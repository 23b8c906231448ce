"""Short runs of the demo, end to end."""

import contextlib
import dataclasses
import html.parser
import io
import json
import re
import sys
import types

import jax
import matplotlib.image
import numpy as np
import pytest

from eqxlike import bayes, train
from examples.demo import compare, evaluate, training
from examples.demo.command import main
from examples.demo.report import ON_PAGE, page_of, plain

COLUMNS = {"jax.jit, flat list", "jax.jit, module", "filter_jit"}
PICTURES = {"diabetes_intervals.png", "digits_reliability.png", "elbo.png", "dispatch.png"}
TEXTS = {"results.json", "report.html"}


@pytest.fixture(scope="module", autouse=True)
def small():
    """Linear models and fewer penalties, which compile faster."""
    with pytest.MonkeyPatch.context() as patch:
        rates = {"diabetes": {}, "digits": {"learning_rate": 3e-2, "plain_learning_rate": 1e-2}}
        for name, changed in rates.items():
            settings = dataclasses.replace(training.SETTINGS[name], depth=0, **changed)
            patch.setitem(training.SETTINGS, name, settings)
        patch.setattr(evaluate, "INVERSE_PENALTIES", evaluate.INVERSE_PENALTIES[:2])
        yield


@pytest.fixture(scope="module")
def quick(tmp_path_factory):
    """One run over both data sets."""
    folder = tmp_path_factory.mktemp("demo") / "results"
    with (
        contextlib.redirect_stdout(io.StringIO()) as out,
        contextlib.redirect_stderr(io.StringIO()) as err,
    ):
        status = main(["--quick", "--seed", "1", "--out", str(folder)])
    assert status == 0
    results = json.loads((folder / "results.json").read_text())
    page = (folder / "report.html").read_text(encoding="utf-8")
    texts = {"out": out.getvalue(), "err": err.getvalue(), "page": page}
    return types.SimpleNamespace(folder=folder, results=results, **texts)


def test_demo_prints_its_files_and_aligned_tables(quick):
    assert quick.out.startswith(f"device: {quick.results['device']}\n")
    assert f"digits, Bayesian: step {training.QUICK_STEPS}/{training.QUICK_STEPS}" in quick.err
    assert {path.name for path in quick.folder.iterdir()} == PICTURES | TEXTS
    for name in PICTURES | TEXTS:
        assert str(quick.folder / name) in quick.out
    for name in PICTURES:
        height, width, _ = matplotlib.image.imread(quick.folder / name).shape
        assert min(height, width) > 400
    for words in ("Bayesian MLP", "ridge regression", "logistic regression", *COLUMNS):
        assert words in quick.out
    lines = quick.out.split("diabetes: 133 held-out examples\n")[1].splitlines()[:4]
    assert re.fullmatch(r" {20}RMSE  NLL \(nats\)  in 90% interval  interval width", lines[0])
    for line in lines[1:]:
        assert re.fullmatch(r"  [\w ]{16}  \d\d\.\d +\d\.\d{4} +\d+\.\d% +\d\d\d", line)
        assert len(line) == len(lines[0])


def test_report_lists_settings_versions_and_losses(quick):
    results = quick.results
    assert (results["stopped"], results["seed"], results["quick"]) == ("finished", 1, True)
    assert {"jax", "eqxlike", "python", "optax", "scikit-learn"} <= set(results["machine"])
    for data in results["data"].values():
        assert data["trainings"]["bayesian"]["steps"] == training.QUICK_STEPS
        assert len(data["elbo"]) == data["settings"]["steps"] == training.QUICK_STEPS
        assert sum(data["elbo"][-20:]) > sum(data["elbo"][:20])
        assert data["examples"]["test"] < data["examples"]["train"]


def test_metrics_are_plausible_and_agree_with_intervals_and_bins(quick):
    data = quick.results["data"]["diabetes"]
    assert set(data["metrics"]) == set(data["intervals"]) == {"bayesian", "plain", "ridge"}
    assert set(data["dispatch"]) == {"training step", "prediction"}
    for name, model in data["metrics"].items():
        # The target has a standard deviation of 77; the linear model's error is about 55.
        assert 40 < model["rmse"] < 70
        assert 5 < model["nll"] < 6
        assert 0.75 < model["coverage"] <= 1
        assert 100 < model["width"] < 300
        found = {field: np.array(values) for field, values in data["intervals"][name].items()}
        is_inside = (found["lower"] <= found["truth"]) & (found["truth"] <= found["upper"])
        assert is_inside.sum() == round(model["coverage"] * data["examples"]["test"])
    data = quick.results["data"]["digits"]
    assert set(data["metrics"]) == set(data["reliability"]) == {"bayesian", "plain", "logistic"}
    for name, model in data["metrics"].items():
        assert 0.9 < model["accuracy"] <= 1
        assert 0 < model["nll"] < 0.4
        assert 0 <= model["ece"] < 0.1
        assert sum(data["reliability"][name]["count"]) == data["examples"]["test"]


class Parser(html.parser.HTMLParser):
    """Checks that elements nest. Collects their attributes, and the text outside scripts."""

    EMPTY = frozenset({"meta", "link", "br", "img", "input"})

    def __init__(self, page):
        super().__init__()
        self.open, self.attributes, self.text = [], [], []
        self.feed(page)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.attributes += attrs
        if tag not in self.EMPTY:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] not in ("script", "style"):
            self.text.append(data)


def test_page_loads_no_other_files(quick):
    attributes = {name for name, _ in Parser(quick.page).attributes}
    assert attributes.isdisjoint({"src", "href", "srcset"})
    # The URL of the XML namespace is not downloaded.
    page = quick.page.replace("http://www.w3.org/2000/svg", "")
    assert re.findall(r"https?:|//\w|url\(|@import|fetch\(|XMLHttpRequest|import\(", page) == []


def test_page_has_all_numbers_as_text_and_explains_their_names(quick):
    text = Parser(quick.page).text
    for data in quick.results["data"].values():
        for metrics in data["metrics"].values():
            assert {format(metrics[name], ON_PAGE[name][1]) for name in metrics} <= set(text)
        for name, value in data["settings"].items():
            assert any(re.fullmatch(rf"{name} = {value:g}", each) for each in text)
        for measured in data["dispatch"].values():
            assert set(measured["columns"]) == COLUMNS
            for called, column in measured["columns"].items():
                assert {called, format(column["completion_us"], ",.1f")} <= set(text)
    headings = {each.removesuffix(" (µs)") for each in re.findall(r"<th>(.+?)</th>", quick.page)}
    assert headings <= set(re.findall(r"<dt>(.+?)</dt><dd>.+?</dd>", quick.page))


def test_markup_in_messages_is_escaped(quick):
    bad = "</script><img src=x onerror=alert(1)>&@@REPORT@@\"'"
    result = {"steps": 1, "planned": 2, "stopped": "diverged", "message": bad}
    data = quick.results["data"]["diabetes"] | {"trainings": {"plain": result}}
    report = quick.results | {"device": bad, "stopped": "diverged", "data": {"diabetes": data}}
    page = page_of(report)
    parser = Parser(page)
    assert "onerror" not in dict(parser.attributes)
    assert f"diabetes, plain MLP: {bad}" in parser.text
    found = re.search(r'<script type="application/json" id="report">(.*?)</script>', page)
    assert found is not None
    assert json.loads(found[1]) == report


def test_diverged_training_ends_with_its_last_finite_state(tmp_path, capsys, monkeypatch):
    batches_of = training._batches

    def broken_after_three_steps(part, batch_size, seed):
        monkeypatch.setattr(training, "_batches", batches_of)  # Later calls succeed.
        for count, batch in enumerate(batches_of(part, batch_size, seed)):
            yield jax.tree.map(lambda array: array * np.nan, batch) if count == 3 else batch

    monkeypatch.setattr(training, "_batches", broken_after_three_steps)
    monkeypatch.setattr(compare, "measure_calls", lambda *arguments: {})
    assert main(["--data", "diabetes", "--quick", "--steps", "5", "--out", str(tmp_path)]) == 1
    (line,) = [line for line in capsys.readouterr().err.splitlines() if ": step " not in line]
    assert line.startswith("diabetes, bayesian: The loss was nan in step 4; the state is the")
    results = json.loads((tmp_path / "results.json").read_text())
    data = results["data"]["diabetes"]
    assert results["stopped"] == data["trainings"]["bayesian"]["stopped"] == "diverged"
    assert data["metrics"]["bayesian"]["rmse"] < 100
    assert "A training diverged." in (tmp_path / "report.html").read_text(encoding="utf-8")


def test_interrupt_keeps_the_finished_results(tmp_path, capsys, monkeypatch, ctrl_c):
    minibatches = train.minibatches

    def interrupted(*arguments, **options):
        for index, batch in enumerate(minibatches(*arguments, **options)):
            if index == 4:
                ctrl_c()
            yield batch

    monkeypatch.setattr(train, "minibatches", interrupted)
    arguments = ["--data", "diabetes", "--quick", "--device", "cpu", "--out", str(tmp_path)]
    assert main(arguments) == 130
    out, err = capsys.readouterr()
    assert err.splitlines()[-1] == "interrupted: the results cover what was finished"
    assert "device: cpu\n" in out
    results = json.loads((tmp_path / "results.json").read_text())
    data = results["data"]["diabetes"]
    assert results["stopped"] == data["trainings"]["bayesian"]["stopped"] == "interrupted"
    assert 4 <= data["trainings"]["bayesian"]["steps"] <= 5
    assert set(data["trainings"]) == set(data["metrics"]) == {"bayesian"}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--data", "iris"], "argument --data: invalid choice: 'iris'"),
        (["--steps", "0"], "argument --steps: must be an integer of at least 1"),
        (["--seed", "-1"], "argument --seed: must be an integer of at least 0 and at most 2147"),
        (["--seed", "2147483648"], "argument --seed: must be an integer of at least 0"),
        (["--device", "gpu"], "gpu"),
        (["--out", "file/results"], "argument --out: cannot write to 'file/results'"),
        (["--nonsense"], "unrecognized arguments: --nonsense"),
    ],
)
def test_wrong_argument_is_one_line(arguments, said, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(SystemExit) as ended:
        main(["--quick", *arguments])
    assert ended.value.code == 2
    err = capsys.readouterr().err
    assert said in err
    assert err.startswith("python -m examples.demo: error: ")
    assert err.count("\n") == 1


def test_missing_package_names_what_to_install(monkeypatch):
    monkeypatch.delitem(sys.modules, "examples.demo.__main__", raising=False)
    monkeypatch.setitem(sys.modules, "examples.demo.command", None)  # simulates a missing package
    with pytest.raises(SystemExit, match=r"pip install -e '\.\[demo\]'"):
        __import__("examples.demo.__main__")


@pytest.mark.parametrize("name", ["diabetes", "digits"])
def test_data_are_split_by_seed_and_scaled_by_the_training_part(name):
    whole = training.load(name)
    data = training.prepare(name, whole, seed=3)
    assert whole.x.shape == {"diabetes": (442, 10), "digits": (1797, 64)}[name]
    assert len(data.train.y) + len(data.test.y) == len(whole.y)
    np.testing.assert_allclose(data.train.x.mean(axis=0), 0, atol=1e-4)
    np.testing.assert_allclose(np.mean(data.train.x**2), 1, rtol=1e-4)
    is_test = np.zeros(len(whole.y), bool)
    is_test[np.random.default_rng(3).permutation(len(whole.y))[: len(data.test.y)]] = True
    x = np.where(is_test[:, None], 1e6, whole.x)
    changed = training.prepare(name, training.Examples(x, whole.y), seed=3)
    np.testing.assert_array_equal(changed.train.x, data.train.x)
    assert not np.any(changed.test.x == data.test.x)
    other = training.prepare(name, whole, seed=4)
    assert not np.array_equal(other.train.y, data.train.y)
    fit_part, validation = data.validation_split()
    np.testing.assert_array_equal(np.concatenate([validation.x, fit_part.x]), data.train.x)


def test_demo_has_every_method_of_bayes():
    made = {type(make(training.SETTINGS["digits"])) for _, make in evaluate.METHODS.values()}
    of_library = {
        each
        for each in vars(bayes).values()
        if isinstance(each, type) and issubclass(each, bayes.Method) and each is not bayes.Method
    }
    assert made == of_library


def test_nan_and_infinity_are_none_in_json():
    found = plain({"a": np.array([np.nan, 1.23456789]), "b": np.inf, "c": np.int32(3)})
    assert found == {"a": [None, 1.23457], "b": None, "c": 3}
