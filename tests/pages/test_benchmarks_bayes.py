"""The benchmarks of Bayesian methods: data, scores and tables of the quality benchmark, and
densities of the cost benchmark. No test uses a clock.
"""

import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

from benchmarks import bayes_cost, bayes_quality
from benchmarks.command import OwnRow
from benchmarks.cost import densities, sampling
from benchmarks.quality import baselines, methods, tables
from benchmarks.quality.data import DataSet, read_csv, scores, set_coverage, split
from eqxlike import bayes


@pytest.fixture(autouse=True)
def reuse(promotion):
    """Allows key reuse, which NumPyro needs."""
    with jax.debug_key_reuse(False):
        yield


def linear_data(num=60, noise=0.1, num_classes=None):
    """Targets that are linear in three features, with noise; the fourth feature is constant."""
    random = np.random.default_rng(0)
    x = np.concatenate([random.normal(5.0, 3.0, (num, 3)), np.full((num, 1), 7.0)], axis=1)
    y = 40.0 + x[:, 0] - 2 * x[:, 1] + noise * random.normal(size=num)
    if num_classes is not None:
        y = np.digitize(y, np.quantile(y, np.arange(1, num_classes) / num_classes))
    return DataSet("linear", x, y.astype(np.int32 if num_classes else float), num_classes)


# --- data ---


def test_split_has_each_example_once_and_is_standardised_by_its_training_part():
    data = linear_data()
    part = split(data, 0)
    assert (len(part.x), len(part.x_test)) == (54, 6)
    trained = part.y * part.unit + part.centre
    np.testing.assert_allclose(sorted([*trained, *part.y_test]), sorted(data.y), rtol=1e-5)
    for each in (part.x[:, :3], part.y):
        np.testing.assert_allclose(each.mean(axis=0), 0.0, atol=1e-6)
        np.testing.assert_allclose(each.std(axis=0), 1.0, rtol=1e-5)
    # A constant feature becomes 0.
    assert not np.any(part.x[:, 3])
    assert not np.any(part.x_test[:, 3])


def write_csv(path, lines):
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.mark.parametrize(
    ("separator", "has_names"), [(",", True), (";", False), ("\t", False), ("  ", True)]
)
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
        ([], "twenty rows or more of numbers, features and then the target; got 0 rows"),
        (["1,2"] * 19, "got 19 rows of 2"),
        (["1"] * 20, "got 20 rows of 1"),
        (["1,2"] * 20 + ["1,2,3"], r"rows have different lengths, \[2, 3\]"),
        (["1,2"] * 20 + ["1,nan"], r"row 21 .* value that is not a number: \['1', 'nan'\]"),
    ],
)
def test_wrong_csv_is_refused(tmp_path, lines, message):
    with pytest.raises(ValueError, match=message):
        read_csv(write_csv(tmp_path / "poor.csv", lines))


# --- scores ---


def test_scores_are_in_the_unit_of_the_targets():
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


def test_coverage_of_sets_equals_uncalibrated_conformal_prediction():
    """Averages over random decisions whether a set contains its last class."""
    random = np.random.default_rng(0)
    probabilities = random.dirichlet([0.5, 0.5, 0.5, 0.5], size=40).astype(np.float32)
    labels = random.integers(0, 4, size=40)
    sets = bayes.ConformalSets(jnp.asarray(0.9), 0.9, "adaptive", True)
    prediction = baselines.of_probabilities(probabilities)
    many = jax.vmap(lambda key: sets(prediction, key=key))(jax.random.split(jax.random.key(0), 500))
    drawn = np.mean(np.asarray(many)[:, np.arange(40), labels])
    np.testing.assert_allclose(set_coverage(probabilities, labels), drawn, atol=0.01)


# --- methods ---


def test_every_method_has_a_row():
    of_package = {
        name
        for name, each in vars(bayes).items()
        if inspect.isclass(each) and issubclass(each, bayes.Method) and each is not bayes.Method
    }
    assert {type(each).__name__ for each in methods.METHODS.values()} == of_package
    assert set(methods.OF_LARGE) | set(methods.QUICK) <= set(methods.METHODS)


def test_scale_of_the_prior_is_chosen_on_the_training_part(monkeypatch):
    looked_at = []

    def nll(part, scale):
        looked_at.append(part)
        return abs(scale - 2.0)

    monkeypatch.setattr(baselines, "_nll_of_map", nll)
    whole = split(linear_data(), 0)
    assert baselines.prior_scale(whole) == 2.0
    held_out = np.concatenate([part.y_test for part in looked_at[: baselines.NUM_PARTS]])
    np.testing.assert_array_equal(np.sort(held_out), np.sort(whole.data.y[whole.train]))
    for part in looked_at:
        seen = [*(part.y * part.unit + part.centre), *part.y_test]
        np.testing.assert_allclose(np.sort(seen), np.sort(held_out), rtol=1e-5)


# --- the command ---


@pytest.fixture
def one_method(monkeypatch):
    """Restricts the command to one method, which does not train."""

    def predict(part, key):
        return baselines.of_normals(np.zeros(len(part.y_test)), 9.0)

    row = methods.Row(methods.PLAIN, predict)
    monkeypatch.setattr(methods, "rows", lambda *, is_quick: (row,))
    monkeypatch.setattr(baselines, "PRIOR_SCALES", (1.0,))
    nll = baselines._nll_of_map
    first = functools.cache(lambda: nll(split(linear_data(), 0), 1.0))
    monkeypatch.setattr(baselines, "_nll_of_map", lambda part, scale: first())
    monkeypatch.setattr(bayes_quality, "OF_CSV", 2)
    # Keeps the compiled programs of other tests.
    monkeypatch.setattr(jax, "clear_caches", lambda: None)


def test_command_compares_a_table_with_published_results(one_method, tmp_path, report_of, capsys):
    random = np.random.default_rng(0)
    table = random.normal(size=(20, 3))
    path = write_csv(tmp_path / "Yacht.csv", [",".join(map(str, row)) for row in table])
    written = report_of(bayes_quality, "--csv", str(path))
    assert written["is_complete"]
    (row,) = written["rows"]
    assert (row["data"], row["method"], len(row["splits"])) == ("Yacht", "plain network", 2)
    printed = capsys.readouterr().out
    assert printed.strip() == tables.render(written, markdown=False)
    lines = [" ".join(line.split()) for line in printed.splitlines()]
    published = {
        "deep ensembles, published 1.18 1.58",
        "MC dropout, published 1.55 1.11",
        "probabilistic backpropagation, published 1.63 1.02",
    }
    assert published <= set(lines)
    assert any(line.startswith("- deep ensembles: Lakshminarayanan") for line in lines)


# --- its targets ---


def made_up(data, method, nll, coverage):
    split = {"nll": nll, "accuracy": 1.0, "calibration_error": 0.1, "seconds": 1.0}
    splits = [split | {"coverage": coverage + by, "seconds": by} for by in (0.01, -0.01, 0.0)]
    return {"data": data, "method": method, "splits": splits}


def test_targets_name_the_best_method_and_the_methods_with_coverage():
    rows = [
        made_up("a", methods.PLAIN, 2.0, 0.9),
        made_up("a", methods.STOPPED, 1.75, 0.9),
        made_up("a", "MAP", 1.5, 0.9),
        made_up("a", "NUTS", 1.0, 0.88),
        made_up("b", methods.PLAIN, 2.0, 0.9),
        made_up("b", "MAP", 2.5, 0.9),
        made_up("b", "NUTS", 2.25, 0.99),
    ]
    assert [(each.found, each.is_reached) for each in tables.targets({"rows": rows})] == [
        ("a 1.000 (NUTS) to 2.000; b 2.250 (NUTS) to 2.000", False),
        ("a 1.000 (NUTS) to 1.750", True),
        ("1 on all data (MAP); by data: a 2, b 1", False),
    ]


def target_of(words, rows):
    return next(each for each in tables.targets({"rows": rows}) if words in each.aim)


def test_recommended_call_must_predict_well_with_coverage_on_all_data():
    rows = [
        made_up("a", methods.STOPPED, 2.0, 0.9),
        made_up("a", methods.RECOMMENDED, 1.5, 0.88),
        made_up("b", methods.STOPPED, 2.0, 0.9),
        made_up("b", methods.RECOMMENDED, 1.0, 0.9),
    ]

    def found(rows):
        return target_of("recommended call", rows)

    assert found(rows).found == "a 1.500 to 2.000, 0.880; b 1.000 to 2.000, 0.900"
    assert found(rows).is_reached
    assert not found([*rows[:3], made_up("b", methods.RECOMMENDED, 2.5, 0.9)]).is_reached
    assert not found([*rows[:3], made_up("b", methods.RECOMMENDED, 1.0, 0.95)]).is_reached


def test_laplace_must_stay_near_the_mode_and_win_on_average():
    def found(*nlls):
        rows = [made_up(name, methods.MODE, 2.0, 0.9) for name in "ab"]
        rows += [made_up(*of, 0.9) for of in zip("ab", [methods.LAPLACE] * 2, nlls, strict=True)]
        return target_of(methods.LAPLACE, rows)

    assert found(2.08, 1.8).found == "a 1.040, b 0.900; mean 0.970"
    assert found(2.08, 1.8).is_reached
    assert not found(2.12, 1.0).is_reached
    assert not found(2.08, 1.96).is_reached


# --- cost ---

MAKERS = (
    densities.by_hand,
    densities.vector_by_hand,
    densities.of_unknowns,
    densities.of_vector,
    densities.by_numpyro,
)


def flat(gradient):
    return np.concatenate([np.ravel(leaf) for leaf in jax.tree_util.tree_leaves(gradient)])


def test_densities_and_their_gradients_agree():
    stated = densities.network(5)
    made = [make(stated, linked=True) for make in MAKERS]

    @jax.jit
    def all_of_them(at):
        return [jax.value_and_grad(f)(each) for (f, _), each in zip(made, at, strict=True)]

    results = all_of_them([unknowns for _, unknowns in made])
    value, gradient = results[-1]
    results[-1] = value, [gradient[site] for site in stated.sites]
    found = [np.append(flat(gradient), value) for value, gradient in results]
    for other in found[1:]:
        np.testing.assert_allclose(other, found[0], rtol=1e-4, atol=1e-3)


def test_report_prints_its_targets(capsys, monkeypatch):
    def measured(options):
        run = {"ess": 10.0, "seconds": 1.0, "r_hat": 1.0, "gradients": 7.0, "divergences": 0}
        runs = {sampling.OURS: [run], sampling.NUMPYRO: [run | {"seconds": 2.0}]}
        own = {"name": "a model", "table": sampling.TABLE, "columns": {}, "notes": []}
        return own | {"runs": runs, "draws": options.draws}

    rows = [OwnRow("a model", sampling.TABLE, measured)]
    monkeypatch.setattr(bayes_cost, "all_rows", lambda: rows)
    assert bayes_cost.main(["--rows", "a model"]) == 0
    printed = capsys.readouterr().out
    expected = "- reached: effective samples a second, to NumPyro's: at least 1.2: 2.00 (a model)"
    assert expected in printed.splitlines()
