"""Diagnostics that compare the predictions of draws with the predictions of one network."""

import re
import warnings
from typing import Any

import jax.numpy as jnp
import jax.random as jr
import numpy as np
import optax
import pytest

import eqxlike as eqx
from eqxlike import bayes, nn
from tests.bayes.methods.cases import DESCENT

pytestmark = pytest.mark.usefixtures("double_precision")

X = np.linspace(-1.0, 1.0, 40)[:, None]
Y = 2 * X[:, 0] + np.random.default_rng(0).normal(0.0, 0.1, 40)
HELD_OUT = X[::4] + 0.01, Y[::4]


def run(method, **kwargs):
    model = nn.Linear(1, "scalar", key=jr.key(0), dtype=jnp.float64)
    target = bayes.Posterior(model, bayes.normal(0.0, 1.0), bayes.Gaussian(0.1), (X, Y))
    return bayes.infer(target, method, key=jr.key(1), progress=False, **kwargs)


def scores(posterior) -> Any:
    """The scores as `Any`, because the type checker does not know their type."""
    return posterior.diagnostics.predictive


def laplace(width):
    return bayes.Laplace(steps=50, optimiser=DESCENT, structure="full", width=width)


def test_posterior_too_wide_for_held_out_data_warns():
    with pytest.warns(bayes.InferenceWarning) as caught:
        found = scores(run(laplace(1e4), held_out=HELD_OUT))
    assert found.held_out_posterior > found.held_out_point + 0.05
    text = (
        f"Laplace: draws predict held-out data worse than the network at the mode or mean: the NLL "
        f"is {found.held_out_posterior:.3g} nats per example for the draws, and "
        f"{found.held_out_point:.3g} for that network. Use `width=None`, which chooses the width "
        "by leave-one-out, or another structure."
    )
    assert [str(each.message) for each in caught] == [text]
    text = "draws predict the training data worse .* Pass `held_out=` to test"
    with pytest.warns(bayes.InferenceWarning, match=text):
        run(laplace(1e4))


def test_posterior_with_the_right_width_or_no_width_does_not_warn():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        exact, narrow = run(laplace(1.0), held_out=HELD_OUT), run(laplace(1e-16))
        assert scores(run(bayes.MAP(steps=50, optimiser=DESCENT))) is None
    assert scores(exact).held_out_posterior is not None
    found = scores(narrow)
    np.testing.assert_allclose(found.posterior, found.point, rtol=1e-6)
    assert found.held_out_posterior is None


FAR_WORSE = "held-out data are predicted far worse than the training data"


def test_example_with_density_0_is_no_warning_about_the_draws():
    with pytest.warns(bayes.InferenceWarning) as caught:
        posterior = run(laplace(1.0), held_out=(X[:2], np.array([0.0, 1e200])))
    assert scores(posterior).held_out_point == scores(posterior).held_out_posterior == np.inf
    assert [FAR_WORSE in str(each.message) for each in caught] == [True]


METHODS = [
    bayes.MAP(steps=50, optimiser=DESCENT),
    bayes.SGLD(num_samples=20, num_warmup=20, thin=1, chains=2, descent_steps=200, batch_size=20),
]


@pytest.mark.parametrize("method", METHODS, ids=lambda method: type(method).__name__)
@pytest.mark.filterwarnings("ignore:SGLD. the (chains disagree|draws of what)")
def test_method_without_a_reference_network_is_compared_on_held_out_data(method):
    with pytest.warns(bayes.InferenceWarning, match=FAR_WORSE):
        found = scores(run(method, held_out=(X, Y + 1)))
    assert found.held_out_posterior > found.posterior + 10
    assert found.point is None
    assert found.held_out_point is None
    run(method, held_out=HELD_OUT)


def test_worse_score_of_a_single_example_does_not_warn():
    slope, largest = 2 * X[:, 0], np.argmax(np.abs(Y - 2 * X[:, 0]))
    example = X[largest : largest + 1], slope[largest : largest + 1] + 0.2
    found = scores(run(METHODS[0], held_out=example))
    assert found.held_out_posterior > found.posterior + 1


def test_outputs_that_are_nan_count_as_far_worse():
    with pytest.warns(bayes.InferenceWarning, match=FAR_WORSE):
        found = scores(run(METHODS[0], held_out=(np.full((1, 1), 1e308), Y[:1])))
    assert found.held_out_posterior == np.inf


def test_held_out_inputs_between_integers_are_not_rounded():
    class Slope(eqx.Module):
        slope: Any

        def __call__(self, x):
            return self.slope * x.astype(float)

    x = np.arange(4)
    likelihood = bayes.Gaussian(0.1)
    target = bayes.Posterior(Slope(jnp.zeros(())), bayes.normal(), likelihood, (x, 1.0 * x))
    method = bayes.MAP(steps=20, optimiser=optax.lbfgs())
    held_out = x[1:] - 0.5, x[1:] - 0.5
    posterior = bayes.infer(target, method, key=jr.key(0), progress=False, held_out=held_out)
    found = scores(posterior)
    np.testing.assert_allclose(found.held_out_posterior, found.posterior, atol=1e-3)


def test_only_held_out_data_decide_if_they_are_given():
    with pytest.warns(bayes.InferenceWarning) as caught:
        found = scores(run(laplace(1e3), held_out=(X, Y + 2)))
    assert found.posterior > found.point + 0.05
    assert found.held_out_posterior < found.held_out_point
    assert [FAR_WORSE in str(each.message) for each in caught] == [True]


def test_simulations_are_not_compared():
    model = nn.Linear(1, "scalar", key=jr.key(0), dtype=jnp.float64)
    target = bayes.Posterior(model, bayes.normal(0.0, 1.0), bayes.Gaussian(0.1), (X, Y))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        bayes.simulation_ranks(target, laplace(1e4), key=jr.key(0), num_simulations=1)


@pytest.mark.parametrize(
    ("held_out", "message"),
    [
        ((X, Y[1:]), "infer: held_out: data: all arrays must have the same length"),
        ((X, np.full(40, np.nan)), "infer: held_out: data: y[0] is nan"),
        (X, "infer: held_out: data must be a pair (x, y)"),
    ],
)
def test_wrong_held_out_data_are_refused(held_out, message):
    with pytest.raises((TypeError, ValueError), match=re.escape(message)):
        run(bayes.MAP(), held_out=held_out)
