"""The benchmark of the cost of Bayesian methods: what it compares is the same. No clock is read."""

import jax
import numpy as np
import pytest

from benchmarks import bayes_cost
from benchmarks.cost import densities, models, sampling
from benchmarks.cost.rows import Effort, Row
from benchmarks.cost.targets import targets
from benchmarks.targets import at_least, at_most
from eqxlike import bayes

OF_SPACE = {
    False: (densities.by_hand, densities.of_unknowns),
    True: (
        densities.by_hand,
        densities.vector_by_hand,
        densities.of_unknowns,
        densities.of_vector,
        densities.by_numpyro,
    ),
}


@pytest.fixture(autouse=True)
def as_numpyro_computes():
    """NumPyro promotes ranks and dtypes, as what is written by hand does, and uses keys again."""
    with (
        jax.numpy_rank_promotion("allow"),
        jax.numpy_dtype_promotion("standard"),
        jax.debug_key_reuse(False),
    ):
        yield


def flat(gradient):
    return np.concatenate([np.ravel(leaf) for leaf in jax.tree_util.tree_leaves(gradient)])


@pytest.mark.parametrize("linked", [False, True], ids=["standard", "linked"])
def test_densities_and_their_gradients_are_the_same(linked):
    stated = models.network(5)
    found = []
    for make in OF_SPACE[linked]:
        density, unknowns = make(stated, linked)
        value, gradient = jax.jit(jax.value_and_grad(density))(unknowns)
        if make is densities.by_numpyro:
            gradient = [gradient[site] for site in stated.sites]
        found.append(np.append(flat(gradient), value))
    for other in found[1:]:
        np.testing.assert_allclose(other, found[0], rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("make", [lambda: models.network(5), models.logistic_regression])
def test_predictions_are_those_of_the_model(make):
    stated = make()
    x, _ = stated.data
    unknowns = stated.unknowns()
    outputs = jax.vmap(stated.target.model(unknowns))(x)
    if isinstance(stated.target.likelihood, bayes.Bernoulli):
        outputs = jax.nn.sigmoid(outputs)
    np.testing.assert_allclose(stated.predict(stated.start, x), outputs, rtol=1e-5)


def test_loop_ends_with_the_value_where_it_began():
    density, unknowns = densities.vector_by_hand(models.network(5), True)
    value = densities.loop_call(jax.jit, density, unknowns)()
    np.testing.assert_allclose(value, density(unknowns), rtol=1e-3)


@pytest.mark.filterwarnings("ignore::eqxlike.bayes.InferenceWarning")
def test_chains_of_both_are_of_the_same_form():
    stated = models.logistic_regression()
    ours, theirs = (
        make(stated, 4, "vectorized")(0) for make in (sampling.ours, sampling.by_numpyro)
    )
    sizes = [
        [array.reshape(sampling.CHAINS, 4, -1).shape for array in drawn.arrays]
        for drawn in (ours, theirs)
    ]
    assert sizes[0] == sizes[1] == [(4, 4, 8), (4, 4, 1)]
    assert np.shape(ours.gradients) == np.shape(theirs.gradients) == (4, 4)


def test_ratio_is_that_of_the_mean_rates():
    ours = [{"ess": 100.0, "seconds": 1.0}, {"ess": 300.0, "seconds": 1.0}]
    row = {"runs": {sampling.OURS: ours, sampling.NUMPYRO: [{"ess": 50.0, "seconds": 0.5}]}}
    assert sampling.ratio(row) == 2.0


def test_rows_have_names_of_their_own():
    names = [row.name for row in bayes_cost.all_rows()]
    assert len(set(names)) == len(names)


def test_report_prints_its_targets(capsys, monkeypatch):
    def measured(row, effort):
        run = {"ess": 10.0, "seconds": 1.0, "r_hat": 1.0, "gradients": 7.0, "divergences": 0}
        runs = {sampling.OURS: [run], sampling.NUMPYRO: [run | {"seconds": 2.0}]}
        own = {"name": row.what, "table": row.table, "columns": {}, "notes": []}
        return own | {"runs": runs, "draws": effort.draws}

    rows = [Row(sampling.TABLE, "a model", measured)]
    monkeypatch.setattr(bayes_cost, "all_rows", lambda: rows)
    assert bayes_cost.main(["--rows", "a model"]) == 0
    printed = capsys.readouterr().out
    expected = "- reached: effective samples a second, to NumPyro's: at least 1: 2.00 (a model)"
    assert expected in printed.splitlines()


def test_rows_that_no_pattern_finds_are_refused(capsys):
    assert bayes_cost.main(["--rows", "nothing of the kind"]) == 2
    assert "no case matches 'nothing of the kind'" in capsys.readouterr().err


def test_report_without_rows_has_no_targets():
    assert targets(bayes_cost.new_report(Effort(1, 1, 1, 1))) == []


def test_worst_number_decides_a_target():
    found = {"one": 1.0, "other": 2.0}
    assert [each.is_reached for each in at_most("cost", 1.5, found)] == [False]
    assert [each.is_reached for each in at_least("gain", 1.0, found)] == [True]
