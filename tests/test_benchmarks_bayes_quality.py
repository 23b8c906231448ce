"""The benchmark of Bayesian methods on real data: what it splits, scores and prints. No clock is
read.
"""

import inspect
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

from benchmarks import bayes_quality
from benchmarks.quality import baselines, methods, network, tables
from benchmarks.quality.data import SOURCES, DataSet, read_csv, split
from benchmarks.quality.scores import interval_calibration_error, scores, set_coverage
from benchmarks.quality.targets import targets
from eqxlike import bayes


@pytest.fixture(autouse=True)
def numpyro_promotes():
    """NumPyro promotes ranks and dtypes."""
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        yield


def linear_data(num=60, noise=0.1, num_classes=None):
    """Targets that are linear in three features but for noise; the fourth feature is constant."""
    random = np.random.default_rng(0)
    x = np.concatenate([random.normal(5.0, 3.0, (num, 3)), np.full((num, 1), 7.0)], axis=1)
    y = 40.0 + x[:, 0] - 2 * x[:, 1] + noise * random.normal(size=num)
    if num_classes is not None:
        y = np.digitize(y, np.quantile(y, np.arange(1, num_classes) / num_classes))
    return DataSet("linear", x, y.astype(np.int32 if num_classes else float), num_classes)


# --- data ---


@pytest.mark.parametrize("source", SOURCES, ids=lambda source: source.name)
def test_data_of_scikit_learn_have_their_classes(source):
    data = source.load()
    assert data.name == source.name
    if not data.is_regression:
        assert set(data.y) == set(range(data.num_classes))


def test_split_has_each_example_once():
    data = linear_data()
    part = split(data, 3)
    assert (len(part.x), len(part.x_test)) == (54, 6)
    trained = part.y * part.unit + part.centre
    np.testing.assert_allclose(sorted([*trained, *part.y_test]), sorted(data.y), rtol=1e-5)


def test_split_is_standardised_by_what_is_trained_on():
    part = split(linear_data(), 0)
    for each in (part.x[:, :3], part.y):
        np.testing.assert_allclose(each.mean(axis=0), 0.0, atol=1e-6)
        np.testing.assert_allclose(each.std(axis=0), 1.0, rtol=1e-5)
    # A constant feature is 0.
    assert not np.any(part.x[:, 3])
    assert not np.any(part.x_test[:, 3])


def test_splits_differ_by_their_seed_alone():
    first, same, other = (split(linear_data(), seed) for seed in (0, 0, 1))
    np.testing.assert_array_equal(first.x_test, same.x_test)
    assert not np.array_equal(first.y_test, other.y_test)


def write_csv(path, lines):
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.mark.parametrize("separator", [",", ";", "\t", "  "])
@pytest.mark.parametrize("has_names", [True, False])
def test_csv_is_read(tmp_path, separator, has_names):
    x = np.arange(40.0).reshape(20, 2)
    lines = [separator.join(map(str, row)) for row in np.concatenate([x, x[:, :1] ** 2], axis=1)]
    names = [separator.join("abc")] * has_names
    data = read_csv(write_csv(tmp_path / "squares.csv", names + lines))
    assert (data.name, data.is_regression) == ("squares", True)
    np.testing.assert_array_equal(data.x, x)
    np.testing.assert_array_equal(data.y, x[:, 0] ** 2)


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([], "expected twenty rows or more of numbers, features and then the target; got 0 rows"),
        (["1,2"] * 19, "got 19 rows of 2"),
        (["1"] * 20, "got 20 rows of 1"),
        (["1,2"] * 20 + ["1,2,3"], r"rows have different lengths, \[2, 3\]"),
        (["1,2"] * 20 + ["1,nan"], r"row 21 of the data has what is no number: \['1', 'nan'\]"),
    ],
)
def test_csv_that_is_no_regression_is_refused(tmp_path, lines, message):
    with pytest.raises(ValueError, match=message):
        read_csv(write_csv(tmp_path / "poor.csv", lines))


# --- scores ---


def test_scores_of_numbers_are_in_their_unit():
    part = split(linear_data(), 0)
    means, scales = np.linspace(-1.0, 1.0, 6), np.linspace(0.5, 1.0, 6)
    found = scores(baselines.of_normals(means, scales), part)
    normal = scipy.stats.norm(means * part.unit + part.centre, scales * part.unit)
    np.testing.assert_allclose(found.nll, -normal.logpdf(part.y_test).mean(), rtol=1e-5)
    squares = (part.y_test - normal.mean()) ** 2
    np.testing.assert_allclose(found.accuracy, np.sqrt(squares.mean()), rtol=1e-5)
    lower, upper = normal.interval(0.9)
    is_inside = (lower <= part.y_test) & (part.y_test <= upper)
    np.testing.assert_allclose(found.coverage, is_inside.mean(), rtol=1e-6)


def test_intervals_that_cover_as_they_say_have_no_calibration_error():
    prediction = baselines.of_normals(np.zeros(400), 2.0)
    quantiles = scipy.stats.norm.ppf((np.arange(400) + 0.5) / 400, scale=2.0)
    assert interval_calibration_error(prediction, jnp.asarray(quantiles, jnp.float32)) < 0.005


def test_calibration_error_of_sure_intervals_is_their_mean_level():
    prediction = baselines.of_normals(np.zeros(5), 1e-3)
    error = interval_calibration_error(prediction, jnp.ones(5))
    # Of the levels 0.05, 0.1, ..., 0.95.
    np.testing.assert_allclose(error, 0.5, rtol=1e-6)


def test_sets_of_most_probable_classes_cover_as_they_say():
    """Labels that are drawn from the probabilities, each as often as it is probable."""
    probabilities = np.asarray([[0.5, 0.25, 0.25], [0.95, 0.05, 0.0]])
    repeated = np.repeat(probabilities, 20, axis=0)
    labels = np.concatenate([np.repeat([0, 1, 2], [10, 5, 5]), np.repeat([0, 1], [19, 1])])
    np.testing.assert_allclose(set_coverage(repeated, labels), 0.9, rtol=1e-6)


def test_sets_are_those_of_conformal_prediction_without_calibration():
    """Over many draws of who is the last to be in a set."""
    random = np.random.default_rng(0)
    probabilities = random.dirichlet([0.5, 0.5, 0.5, 0.5], size=40).astype(np.float32)
    labels = random.integers(0, 4, size=40)
    sets = bayes.ConformalSets(jnp.asarray(0.9), 0.9, "adaptive", True)
    prediction = baselines.of_probabilities(probabilities)
    many = jax.vmap(lambda key: sets(prediction, key=key))(jax.random.split(jax.random.key(0), 500))
    drawn = np.mean(np.asarray(many)[:, np.arange(40), labels])
    np.testing.assert_allclose(set_coverage(probabilities, labels), drawn, atol=0.01)


# --- methods ---


def test_every_method_has_a_line():
    of_package = {
        name
        for name, each in vars(bayes).items()
        if inspect.isclass(each) and issubclass(each, bayes.Method) and each is not bayes.Method
    }
    assert {type(each).__name__ for each in methods.METHODS.values()} == of_package
    assert set(methods.OF_LARGE) | set(methods.QUICK) <= set(methods.METHODS)


@pytest.mark.parametrize("num_classes", [None, 2, 3])
def test_network_predicts_as_its_likelihood_asks(num_classes):
    part = split(linear_data(num_classes=num_classes), 0)
    prediction = baselines.plain_network(part, jax.random.key(0), steps=1)
    expected = bayes.Mixture if num_classes is None else bayes.CategoricalMixture
    assert isinstance(prediction, expected)
    assert prediction.batch_shape == part.y_test.shape


def test_scale_of_the_prior_is_chosen_within_the_training_part(monkeypatch):
    looked_at = []

    def nll(part, scale):
        looked_at.append(part)
        return abs(scale - 2.0)

    monkeypatch.setattr(network, "_nll_of_map", nll)
    whole = split(linear_data(), 0)
    assert network.prior_scale(whole) == 2.0
    held_out = np.concatenate([part.y_test for part in looked_at[: network.NUM_PARTS]])
    np.testing.assert_array_equal(np.sort(held_out), np.sort(whole.data.y[whole.train]))
    for part in looked_at:
        seen = [*(part.y * part.unit + part.centre), *part.y_test]
        np.testing.assert_allclose(np.sort(seen), np.sort(held_out), rtol=1e-5)


@pytest.mark.parametrize("num_features", [1, 200])
def test_outputs_vary_by_the_prior_alike_for_few_features_and_many(num_features):
    prior = network.prior(DataSet("", np.ones((30, num_features)), np.ones(30), None), 1.0)
    shapes = {"layers[0].weight": (50, num_features), "layers[3].weight": (50,)}
    for path, shape in shapes.items():
        distribution = prior.of_leaf(path, jax.ShapeDtypeStruct(shape, jnp.float32), {})
        np.testing.assert_allclose(distribution.variance * shape[-1], 1.0, rtol=1e-6)


@pytest.mark.parametrize("predict", [baselines.linear, baselines.gaussian_process])
@pytest.mark.parametrize("num_classes", [None, 3])
def test_baselines_learn_what_is_linear(predict, num_classes):
    part = split(linear_data(num_classes=num_classes), 0)
    found = scores(predict(part, jax.random.key(0)), part)
    if num_classes is None:
        assert found.accuracy < 0.3
    else:
        assert found.accuracy > 0.5


def test_plain_network_believes_noise_and_the_stopped_one_less():
    data = linear_data(num=200)
    noise = np.random.default_rng(1).normal(size=len(data.x))
    part = split(DataSet("noise", data.x, noise, None), 0)
    plain, stopped = (
        scores(predict(part, jax.random.key(0), steps=1500), part)
        for predict in (baselines.plain_network, baselines.stopped_early)
    )
    assert stopped.nll < plain.nll


# --- the command ---


@pytest.fixture
def one_method(monkeypatch):
    """The command has two methods, which hardly train."""
    settings = {"MAP": bayes.MAP(steps=2)}
    monkeypatch.setattr(network, "_nll_of_map", lambda part, scale: scale)
    rows = (
        methods.Row(
            methods.PLAIN, lambda part, key: baselines.of_normals(np.zeros(len(part.y_test)), 9.0)
        ),
        methods.bayesian("MAP", settings, {}),
    )
    monkeypatch.setattr(methods, "rows", lambda *, is_quick: rows)


def test_command_runs_the_published_protocol(one_method, tmp_path, capsys):
    random = np.random.default_rng(0)
    table = random.normal(size=(20, 3))
    path = write_csv(tmp_path / "Yacht.csv", [",".join(map(str, row)) for row in table])
    report = tmp_path / "quality.json"
    assert bayes_quality.main(["--csv", str(path), "--json", str(report)]) == 0
    written = json.loads(report.read_text())
    assert written["is_complete"]
    assert [(row["data"], row["method"], len(row["splits"])) for row in written["rows"]] == [
        ("Yacht", "plain network", 20),
        ("Yacht", "MAP", 20),
    ]
    printed = capsys.readouterr().out
    assert printed.strip() == tables.render(written, targets(written), markdown=False)
    lines = [" ".join(line.split()) for line in printed.splitlines()]
    assert "deep ensembles, published 1.18 1.58" in lines
    assert "MC dropout, published 1.55 1.11" in lines
    assert "probabilistic backpropagation, published 1.63 1.02" in lines
    assert any(line.startswith("- deep ensembles: Lakshminarayanan") for line in lines)


def test_interrupt_leaves_the_finished_rows(one_method, monkeypatch, capsys):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(bayes_quality, "measured", interrupt)
    assert bayes_quality.main(["--quick", "--data", "wine"]) == 130
    assert capsys.readouterr().out.strip() == "no methods were run"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--data", "no such"], "no case matches 'no such'; there are\n  diabetes"),
        (["--methods", "no such"], "no case matches 'no such'; there are\n  plain network"),
        (["--csv", "no such.csv"], "[Errno 2] No such file or directory: 'no such.csv'"),
    ],
)
def test_wrong_arguments_are_told(arguments, message, capsys):
    assert bayes_quality.main(arguments) == 2
    assert capsys.readouterr().err.startswith(f"benchmarks.bayes_quality: {message}")


# --- what it prints ---


def made_up(data, method, nll, coverage):
    split = {"nll": nll, "accuracy": 1.0, "calibration_error": 0.1, "seconds": 1.0}
    splits = [split | {"coverage": coverage + by, "seconds": by} for by in (0.01, -0.01, 0.0)]
    return {"data": data, "method": method, "splits": splits}


def test_targets_name_the_best_and_who_covers_everywhere():
    rows = [
        made_up("a", methods.PLAIN, 2.0, 0.9),
        made_up("a", methods.STOPPED, 1.75, 0.9),
        made_up("a", "MAP", 1.5, 0.9),
        made_up("a", "NUTS", 1.0, 0.88),
        made_up("b", methods.PLAIN, 2.0, 0.9),
        made_up("b", "MAP", 2.5, 0.9),
        made_up("b", "NUTS", 2.25, 0.99),
    ]
    assert [(each.found, each.is_reached) for each in targets({"rows": rows})] == [
        ("a 1.000 (NUTS) to 2.000; b 2.250 (NUTS) to 2.000", False),
        ("a 1.000 (NUTS) to 1.750", True),
        ("1 on all data (MAP); by data: a 2, b 1", False),
    ]


def test_cells_have_standard_errors():
    row = made_up("a", "MAP", 1.5, 0.9) | {"is_regression": True}
    assert tables.cells([row]) == [
        ["", "NLL", "RMSE", "calibration error", "coverage", "seconds"],
        # Seconds: the median of all but the first split.
        ["MAP", "1.500 (0.000)", "1.000 (0.000)", "0.100 (0.000)", "0.900 (0.006)", "-0.01"],
    ]
