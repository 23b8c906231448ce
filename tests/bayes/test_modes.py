"""Whether an optimiser came to a mode, and what is said where it did not."""

import functools

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import optax
import pytest

import eqxlike as eqx
from eqxlike import bayes, nn
from tests.bayes.methods.cases import LinearModel, X, Y, as_vectors, small_target

LINEAR = LinearModel()
QUIET = pytest.mark.filterwarnings("ignore::eqxlike.bayes.InferenceWarning")
STAYS = optax.set_to_zero()


@pytest.fixture(autouse=True, scope="module")
def double_precision():
    with jax.enable_x64(True):
        yield


def run(method, target=None, **kwargs):
    target = LINEAR.target if target is None else target
    return bayes.infer(target, method, key=jr.key(1), progress=False, **kwargs)


def rise(posterior):
    found = posterior.diagnostics.rise
    assert found is not None
    return found


@functools.cache
def short():
    return run(bayes.DeepEnsemble(steps=1, members=3, optimiser=STAYS))


@QUIET
def test_rise_is_all_that_a_normal_posterior_has_above_a_place():
    places = as_vectors(short().samples(3, key=jr.key(0)))
    away = places - LINEAR.mean
    exact = np.einsum("ci,ij,cj->c", away, LINEAR.precision, away) / 2
    found = np.sort(rise(short()))
    np.testing.assert_allclose(found, np.sort(exact) / 3, rtol=1e-3)


@pytest.mark.parametrize(
    ("method", "message"),
    [
        (bayes.MAP(steps=5), "MAP: 1 of 1 runs stopped before they came to a mode: from where"),
        (bayes.Laplace(steps=5), "Laplace: 1 of 1 runs stopped before they came to a mode"),
        (bayes.DeepEnsemble(steps=5, members=3), "DeepEnsemble: 3 of 3 runs stopped before they"),
    ],
    ids=["MAP", "Laplace", "DeepEnsemble"],
)
def test_run_that_stopped_before_a_mode_is_told(method, message):
    with pytest.warns(bayes.InferenceWarning, match=message):
        run(method)


@pytest.mark.parametrize("target", [lambda: LINEAR.target, small_target])
def test_run_with_the_default_settings_is_not_doubted(target):
    assert rise(run(bayes.MAP(), target())) < 0.1


@QUIET
@pytest.mark.parametrize(
    "method",
    [
        bayes.MAP(steps=2, batch_size=3),
        bayes.MCDropout(steps=2),
        bayes.MeanField(steps=2),
        bayes.SWAG(steps=2, batch_size=None, collect_steps=4, collect_every=2, rank=2),
    ],
    ids=lambda method: type(method).__name__,
)
def test_nothing_is_said_where_it_cannot_be_told(method):
    assert run(method, small_target()).diagnostics.rise is None


def test_more_unknowns_than_examples_count_for_no_more():
    model = nn.Linear(2, "scalar", key=jr.key(0), dtype=jnp.float64)
    model = eqx.tree_at(lambda model: model.weight, model, jnp.full((1, 2), 30.0))
    rises = []
    for num in (1, 3):
        data = (jnp.asarray(X[:1]).repeat(num, axis=0), jnp.asarray(Y[:1]).repeat(num))
        # Together they weigh as one.
        target = bayes.Posterior(model, bayes.normal(), bayes.Gaussian(num**0.5), data)
        with pytest.warns(bayes.InferenceWarning, match="for each unknown"):
            rises.append(rise(run(bayes.MAP(steps=1, optimiser=STAYS), target))[0])
    np.testing.assert_allclose(rises[0], 3 * rises[1], rtol=1e-6)


@pytest.mark.parametrize("number", [np.nan, np.inf])
def test_run_that_left_for_infinity_is_told_of_its_loss_alone(number):
    lost = optax.stateless(
        lambda updates, _: jax.tree.map(lambda each: jnp.full_like(each, number), updates)
    )
    with pytest.warns(bayes.InferenceWarning) as caught:
        run(bayes.MAP(steps=2, optimiser=lost))
    assert len(caught) == 1
    assert str(caught[0].message).startswith("MAP: the loss of 1 of 1 runs ended at ")


def test_rise_is_printed():
    assert str(bayes.Diagnostics(rise=np.array([0.25, 3.0]))) == "rise: 0.25, 3"
