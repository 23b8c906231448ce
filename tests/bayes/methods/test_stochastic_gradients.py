"""Markov chains that move by gradients of minibatches: SGLD and SGHMC."""

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest

from eqxlike import bayes
from tests.bayes.methods.cases import LinearModel, as_vectors

LINEAR = LinearModel()

pytestmark = pytest.mark.usefixtures("as_methods_run")


def run(method, **kwargs):
    return bayes.infer(LINEAR.target, method, key=jr.key(1), progress=False, **kwargs)


def sgld_covariance(step_size, temperature):
    """`x' = x - h P x + sqrt(2 h T) noise` has it at last."""
    h, identity = step_size / LINEAR.num_data, np.eye(3)
    return temperature * np.linalg.inv(LINEAR.precision @ (identity - h * LINEAR.precision / 2))


def sghmc_covariance(step_size, temperature, friction, num_gradients):
    """That of the linear map that gradients make of place and momentum, iterated to its end."""
    precision = LINEAR.precision / temperature
    dt = np.sqrt(step_size * temperature / LINEAR.num_data)
    one, zero = np.eye(3), np.zeros((3, 3))
    one_gradient = np.block([[one, dt * one], [-dt * precision, (1 - friction) * one]])
    noise = np.block([[zero, zero], [zero, 2 * friction * one]])
    covariance = zero
    for _ in range(500):
        both = np.block([[covariance, zero], [zero, one]])
        for _ in range(num_gradients):
            both = one_gradient @ both @ one_gradient.T + noise
        covariance = both[:3, :3]
    return covariance


@pytest.mark.parametrize("kind", ["SGLD", "SGHMC"])
def test_draws_have_the_covariance_of_the_recursion(kind):
    temperature = 0.5
    # One draw of each of many chains: all are independent.
    settings = {"num_samples": 1, "thin": 1, "chains": 4000, "descent_steps": 0}
    if kind == "SGLD":
        step_size = 0.1
        expected = sgld_covariance(step_size, temperature)
        method = bayes.SGLD(
            **settings, num_warmup=400, step_size=step_size, temperature=temperature
        )
    else:
        step_size, friction, num_gradients = 0.02, 0.3, 7
        expected = sghmc_covariance(step_size, temperature, friction, num_gradients)
        method = bayes.SGHMC(
            **settings,
            num_warmup=100,
            step_size=step_size,
            temperature=temperature,
            friction=friction,
            trajectory_steps=num_gradients,
        )
    # What is tested is wider than the posterior, by a bias that shows.
    assert np.max(np.diag(expected) / np.diag(LINEAR.covariance)) > 1.1 * temperature
    draws = as_vectors(run(method).samples(key=jr.key(0)))
    white = np.linalg.solve(np.linalg.cholesky(expected), (draws - LINEAR.mean).T)
    num = len(draws)
    np.testing.assert_allclose(np.mean(white, axis=1) * np.sqrt(num), 0, atol=5)
    np.testing.assert_allclose((white @ white.T / num - np.eye(3)) * np.sqrt(num / 2), 0, atol=5)


def test_steps_of_minibatches_are_unbiased():
    problem = bayes.Problem(LINEAR.target)
    method = bayes.SGLD(step_size=1.0, batch_size=4, temperature=1e-20)
    place = problem.initial(jr.key(0))
    step = lambda key: method.step(problem, place, jnp.asarray(0), key)[0] - place
    steps = np.asarray(jax.vmap(step)(jr.split(jr.key(1), 4000)))
    expected = jax.grad(problem.log_density)(place) / LINEAR.num_data
    error = np.std(steps, axis=0) / np.sqrt(len(steps))
    np.testing.assert_allclose((np.mean(steps, axis=0) - expected) / error, 0, atol=5)


def test_the_step_size_decays_by_its_power():
    problem = bayes.Problem(LINEAR.target)
    method = bayes.SGLD(decay=0.5, num_warmup=100, temperature=1e-20)
    place = problem.initial(jr.key(0))
    first, last = (
        method.step(problem, place, jnp.asarray(index), jr.key(1))[0] - place for index in (0, 300)
    )
    np.testing.assert_allclose(first / last, 2, rtol=1e-3)


def test_chains_begin_where_descent_ends():
    problem = bayes.Problem(LINEAR.target)
    place = bayes.SGLD(descent_steps=3000).init(problem, jr.key(0))
    np.testing.assert_allclose(place, LINEAR.mean, atol=1e-2)


def test_chains_that_leave_for_infinity_are_warned_of():
    method = bayes.SGLD(num_samples=20, num_warmup=200, chains=2, step_size=10.0, descent_steps=0)
    with pytest.warns(
        bayes.InferenceWarning,
        match="SGLD: 2 of 2 chains left for infinity: a smaller step_size helps.",
    ):
        posterior = run(method)
    np.testing.assert_array_equal(posterior.diagnostics.lost, [20, 20])
    assert "lost: 20, 20" in str(posterior.diagnostics)
    assert posterior.diagnostics.outputs is None


@pytest.mark.filterwarnings("ignore::eqxlike.bayes.InferenceWarning")
def test_minibatches_are_the_same_in_a_run_that_was_resumed(tmp_path):
    settings = {"num_warmup": 4, "chains": 2, "thin": 1, "batch_size": 3, "descent_steps": 3}
    whole = run(bayes.SGLD(num_samples=8, **settings))
    path = tmp_path / "run"
    run(bayes.SGLD(num_samples=3, **settings), checkpoint=path)
    resumed = run(bayes.SGLD(num_samples=8, **settings), checkpoint=path)
    np.testing.assert_array_equal(resumed.records["draw"], whole.records["draw"])


@pytest.mark.parametrize("kind", [bayes.SGLD, bayes.SGHMC])
def test_a_batch_of_more_examples_than_there_are_is_an_error(kind):
    with pytest.raises(ValueError, match=f"{kind.__name__}: batch_size is 31, and the data has 30"):
        run(kind(batch_size=31))


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        ({"step_size": 0.0}, "step_size must be positive and finite, got 0.0"),
        ({"decay": 1.5}, r"decay must lie in \[0, 1\], got 1.5"),
        ({"temperature": -1.0}, "temperature must be positive and finite, got -1.0"),
        ({"batch_size": 0}, "batch_size must be an integer of at least 1, got 0"),
        ({"descent_steps": -1}, "descent_steps must be an integer of at least 0, got -1"),
    ],
)
def test_settings_that_cannot_serve_are_errors(settings, error):
    with pytest.raises(ValueError, match=f"SGLD: {error}"):
        bayes.SGLD(**settings)


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        ({"friction": 1.5}, r"friction must lie in \(0, 1\], got 1.5"),
        ({"trajectory_steps": 0}, "trajectory_steps must be an integer of at least 1, got 0"),
    ],
)
def test_friction_and_trajectories_that_cannot_serve_are_errors(settings, error):
    with pytest.raises(ValueError, match=f"SGHMC: {error}"):
        bayes.SGHMC(**settings)
