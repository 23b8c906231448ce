"""SWAG: moments of the places that stochastic gradient descent visits."""

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import optax
import pytest

from eqxlike import bayes
from tests.bayes.methods.cases import LinearModel, as_vectors

LINEAR = LinearModel()

pytestmark = pytest.mark.usefixtures("as_methods_run")


def visited(method):
    """The places that a method collects, and what it makes of them."""
    problem = bayes.Problem(LINEAR.target)
    state = method.init(problem, jr.key(0))
    step = jax.jit(lambda state, index, key: method.step(problem, state, index, key)[0])
    places = []
    for index in range(method.num_steps):
        state = step(state, jnp.asarray(index), jr.fold_in(jr.key(1), index))
        if index >= method.steps and (index - method.steps + 1) % method.collect_every == 0:
            places.append(np.asarray(state.place))
    states = jax.tree.map(lambda each: each[None], state)
    return np.array(places), method.finish(problem, states, {}, jr.key(2))


METHOD = bayes.SWAG(steps=5, batch_size=4, collect_steps=24, collect_every=3, rank=4)


def test_moments_are_those_of_the_places_that_were_visited():
    places, found = visited(METHOD)
    assert len(places) == 8
    np.testing.assert_allclose(found.mean, places.mean(axis=0), rtol=1e-12)
    np.testing.assert_allclose(found.squares / found.count, places.var(axis=0), rtol=1e-10)
    means = np.cumsum(places, axis=0) / np.arange(1, 9)[:, None]
    np.testing.assert_allclose(found.deviations, (places - means)[-4:], rtol=1e-9)


def test_half_of_the_covariance_of_draws_is_diagonal_and_half_of_low_rank():
    places, found = visited(METHOD)
    means = np.cumsum(places, axis=0) / np.arange(1, 9)[:, None]
    deviations = (places - means)[-4:]
    expected = np.diag(places.var(axis=0)) / 2 + deviations.T @ deviations / (2 * 3)
    num = 20_000
    draws = METHOD.sample(bayes.Problem(LINEAR.target), found, num, jr.key(0))
    white = np.linalg.solve(np.linalg.cholesky(expected), np.asarray(draws - found.mean).T)
    np.testing.assert_allclose(np.mean(white, axis=1) * np.sqrt(num), 0, atol=5)
    np.testing.assert_allclose((white @ white.T / num - np.eye(3)) * np.sqrt(num / 2), 0, atol=5)


def test_fewer_places_than_the_rank_are_all_kept():
    method = bayes.SWAG(steps=1, batch_size=4, collect_steps=6, collect_every=2, rank=20)
    _, found = visited(method)
    assert found.deviations.shape == (3, 3)


def test_width_is_of_the_order_of_the_posterior():
    # Mandt, Hoffman and Blei (2017): the best learning rate of SGD is 2 B d / (N trace(H)), where H
    # is the Hessian of the loss.
    batch_size, num = 5, LINEAR.num_data
    rate = 2 * batch_size * 3 / np.trace(LINEAR.precision)
    method = bayes.SWAG(batch_size=batch_size, collect_optimiser=optax.sgd(rate))
    posterior = bayes.infer(LINEAR.target, method, key=jr.key(1), progress=False)
    draws = as_vectors(posterior.samples(4000, key=jr.key(0)))
    width = np.sqrt(np.diag(LINEAR.covariance))
    assert np.all(np.abs(draws.mean(axis=0) - LINEAR.mean) < width)
    assert np.all((draws.std(axis=0) > width / 3) & (draws.std(axis=0) < width * 3))
    assert posterior.records["loss"].shape == (1, 4000)
    assert num == 30


def test_a_batch_of_more_examples_than_there_are_is_an_error():
    with pytest.raises(ValueError, match="SWAG: batch_size is 32, and the data has 30 examples"):
        bayes.infer(LINEAR.target, bayes.SWAG(), key=jr.key(1), progress=False)


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        ({"rank": 1}, "rank must be an integer of at least 2, got 1"),
        ({"collect_every": 0}, "collect_every must be an integer of at least 1, got 0"),
        ({"collect_learning_rate": 0.0}, "collect_learning_rate must be positive"),
        (
            {"collect_steps": 30, "collect_every": 20},
            "collect_steps must be at least twice collect_every, got 30 and 20",
        ),
    ],
)
def test_settings_that_cannot_serve_are_errors(settings, error):
    with pytest.raises(ValueError, match=f"SWAG: {error}"):
        bayes.SWAG(**settings)
