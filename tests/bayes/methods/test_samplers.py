"""Tests of individual methods: ensembles, SGLD, SGHMC, SWAG and MC dropout."""

import dataclasses

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import numpyro.distributions as dist
import optax
import pytest
from scipy import stats

import eqxlike as eqx
from eqxlike import bayes, nn
from eqxlike.bayes._fitted import fitted_from
from eqxlike.bayes._method import Chains
from eqxlike.bayes._methods._descent import Optimised
from eqxlike.bayes._methods._markov_chains import SGState
from tests.bayes.methods.cases import LINEAR, LinearModel, Rate, X, Y, check_moments, run

pytestmark = pytest.mark.usefixtures("as_methods_run")


# --- linked space -------------------------------------------------------------------------------


def test_density_of_a_linked_rate_is_its_gamma_posterior():
    counts = np.array([3, 1, 4, 1, 5, 9, 2, 6])
    data = (np.zeros((8, 1)), counts)
    target = bayes.Posterior(Rate(jnp.array(1.0)), dist.Gamma(2.0, 0.5), bayes.Poisson(), data)
    problem, place = bayes.Problem(target), np.linspace(0.5, 2.5, 5)
    densities = lambda place: (problem.log_density(place), problem.batch_log_density(place, data))
    expected = stats.gamma(2.0 + counts.sum(), scale=1 / (0.5 + len(counts))).logpdf(np.exp(place))
    for found in jax.jit(jax.vmap(densities))(place[:, None]):
        np.testing.assert_allclose(np.diff(found), np.diff(expected + place), rtol=1e-9)


# --- optimisers ---------------------------------------------------------------------------------


def test_steps_of_minibatches_are_unbiased():
    problem = bayes.Problem(LINEAR.target)
    gradient = jax.jit(jax.grad(problem.log_density))
    keys = jr.split(jr.key(1), 4000)

    def check(steps, place):
        expected = gradient(place) / LINEAR.num_data
        error = np.std(steps, axis=0) / np.sqrt(len(steps))
        np.testing.assert_allclose((np.mean(steps, axis=0) - expected) / error, 0, atol=5)

    sgld = bayes.SGLD(step_size=1.0, batch_size=4, temperature=1e-20)
    place = jax.jit(lambda: problem.initial(jr.key(0)))()
    start = SGState(place, jnp.zeros_like(place))
    step = lambda key: sgld.step(problem, start, jnp.asarray(0), key)[0].place - place
    check(jax.jit(jax.vmap(step))(keys), place)

    method = bayes.MAP(steps=1, optimiser=optax.sgd(1.0), batch_size=4)
    state = jax.jit(lambda key: method.init(problem, key))(jr.key(0))
    step = lambda key: method.step(problem, state, jnp.asarray(0), key)[0].place - state.place
    check(jax.jit(jax.vmap(step))(keys), state.place)


def test_members_of_an_ensemble_have_different_starts():
    problem = bayes.Problem(LINEAR.target)
    init = jax.vmap(lambda key: bayes.DeepEnsemble(members=3).init(problem, key).place)
    both = jax.jit(lambda keys, key: (init(keys), problem.initial(key)))
    places, initial = map(np.asarray, both(jr.split(jr.key(0), 3), jr.key(0)))
    assert len({tuple(place) for place in places}) > 1
    for place in places:  # the arrays of a start are permutations of the initial arrays
        np.testing.assert_array_equal(np.sort(place[:2]), np.sort(initial[:2]))


def test_members_train_sequentially_if_that_is_faster():
    """Sequential and batched training give the same draws."""
    model = nn.MLP(2, "scalar", width_size=60, depth=1, dtype=jnp.float64, key=jr.key(0))

    def case(repeats, batch_size, *chain_methods):
        data = jax.tree.map(lambda each: np.repeat(each, repeats, axis=0), LINEAR.target.data)
        target = bayes.Posterior(model, bayes.normal(), bayes.Gaussian(0.5), data)
        method = bayes.EarlyStoppedEnsemble(members=2, steps=5, batch_size=batch_size)
        assert not bayes.NUTS().runs_apart(bayes.Problem(target))
        found = [run(method, target, chain_method=each).found for each in chain_methods]
        return method.runs_apart(bayes.Problem(target)), found

    is_apart, (default, together) = case(1, None, None, "vectorized")
    assert not is_apart
    np.testing.assert_array_equal(default, together)
    is_apart, (default, together, apart) = case(2000, None, None, "vectorized", "sequential")
    assert is_apart
    np.testing.assert_array_equal(default, apart)
    np.testing.assert_allclose(together, apart, rtol=1e-9, atol=1e-12)
    is_apart, _ = case(2000, 4)
    assert not is_apart


@jax.jit
def walk_by_hand(is_left_out, place):
    """The positions of 60 steps of Adam, and the scores of the examples that are left out."""
    x, y, design = LINEAR.x, LINEAR.y, LINEAR.design(LINEAR.x)
    optimiser = optax.adam(optax.cosine_decay_schedule(0.1, 60))

    def scores(place):
        return jax.scipy.stats.norm.logpdf(y, design @ place, LINEAR.noise)

    def loss(place):
        prior = jax.scipy.stats.norm.logpdf(place).sum() / len(x)
        return -jnp.mean(scores(place), where=~is_left_out) - prior

    def step(carry, _):
        place, kept = carry
        updates, kept = optimiser.update(jax.grad(loss)(place), kept)
        return (place + updates, kept), place

    (last, _), places = jax.lax.scan(step, (place, optimiser.init(place)), length=60)
    places = jnp.concatenate([places, last[None]])
    return places, jax.vmap(lambda place: jnp.mean(scores(place), where=is_left_out))(places)


def test_members_stop_at_the_best_score_of_their_left_out_examples(tmp_path):
    method = bayes.EarlyStoppedEnsemble(members=8, steps=60, learning_rate=0.1)
    problem, keys = bayes.Problem(LINEAR.target), jr.split(jr.fold_in(jr.key(1), 0), 8)
    first = jax.jit(jax.vmap(lambda key: method.init(problem, key).place))(keys)
    posterior = run(method, checkpoint=tmp_path / "run")
    left_out = np.asarray(posterior.chains.states.order) < 3
    assert len({tuple(each) for each in left_out}) == 8
    walks = [walk_by_hand(*each) for each in zip(left_out, first, strict=True)]
    found = [places[jnp.argmax(scores)] for places, scores in walks]
    np.testing.assert_allclose(posterior.found, found, rtol=1e-9)
    assert len({int(jnp.argmax(scores)) for _, scores in walks} - {0, 60}) > 2
    best = -posterior.records["validation_loss"].min(axis=1)
    np.testing.assert_allclose(posterior.chains.states.best_score, best)
    assert posterior.diagnostics.rise is None
    loaded = bayes.load(tmp_path / "run", LINEAR.target, method)
    np.testing.assert_array_equal(loaded.found, posterior.found)


@pytest.mark.parametrize("batch_size", [None, 2])
def test_left_out_examples_only_affect_when_a_member_stops(batch_size):
    settings = {"learning_rate": 0.1, "batch_size": batch_size}
    method = bayes.EarlyStoppedEnsemble(members=1, steps=31, **settings)
    posterior, (x, y) = run(method), LINEAR.target.data
    order = np.asarray(posterior.chains.states.order)[0]
    left_out = order < 3 if batch_size is None else order[:3]
    other = LINEAR.target.network, bayes.normal(0.0, 1.0), LINEAR.target.likelihood
    changed = run(method, bayes.Posterior(*other, (x, jnp.asarray(y).at[left_out].add(-9))))
    for each in (posterior, changed):
        np.testing.assert_array_equal(each.chains.states.place, posterior.chains.states.place)
        assert ("validation_loss" in each.records) == (batch_size is None)
    assert np.all(np.asarray(changed.found) != posterior.found)

    # Two batches have as many examples as are left out, so every second position is scored.
    problem = bayes.Problem(LINEAR.target)
    key = jr.split(jr.fold_in(jr.key(1), 1), 1)[0]

    @jax.jit
    def places():
        state = method.init(problem, jr.split(jr.fold_in(jr.key(1), 0), 1)[0])
        step = lambda state, i: (method.step(problem, state, i, jr.fold_in(key, i))[0], state.place)
        last, before = jax.lax.scan(step, state, jnp.arange(31))
        return jnp.concatenate([before[:: 1 if batch_size is None else 2], last.place[None]])

    found = np.asarray(places())
    scores = stats.norm(found @ LINEAR.design(x).T, LINEAR.noise).logpdf(y)[:, left_out]
    np.testing.assert_allclose(posterior.found[0], found[scores.mean(axis=1).argmax()], rtol=1e-9)


@pytest.mark.parametrize("batch_size", [None, 4])
def test_noise_is_estimated_on_left_out_examples(batch_size):
    data = x, y = LINEAR.target.data
    network = LINEAR.target.network
    target = bayes.Posterior(
        network, bayes.normal(), bayes.Gaussian(dist.LogNormal(0.0, 5.0)), data
    )
    method = bayes.EarlyStoppedEnsemble(
        members=4, steps=20, validation_fraction=0.3, batch_size=batch_size, learning_rate=0.1
    )
    posterior = run(method, target)
    samples = posterior.samples(4, key=jr.key(0))
    order, num = np.asarray(posterior.chains.states.order), round(0.3 * len(y))
    places = np.argsort(order, axis=1)[:, :num] if batch_size is None else order[:, :num]
    found = jax.vmap(lambda draw, x: jax.vmap(posterior.model(draw))(x))(samples, x[places])
    scale = np.sqrt(np.mean((np.asarray(found) - np.asarray(y)[places]) ** 2))
    np.testing.assert_allclose(samples.likelihood["scale"], scale, rtol=1e-2)


@pytest.mark.filterwarnings("ignore::eqxlike.bayes.InferenceWarning")
def test_score_of_nan_is_never_the_best():
    method = bayes.EarlyStoppedEnsemble(
        members=2, steps=9, optimiser=optax.sgd(1e200), validation_fraction=0.5
    )
    posterior = run(method)
    assert not np.isfinite(posterior.chains.states.place).any()
    assert np.abs(posterior.found).max() < 10


# --- SGLD and SGHMC -----------------------------------------------------------------------------


def test_step_size_decays_by_its_power():
    problem = bayes.Problem(LINEAR.target)
    method = bayes.SGLD(decay=0.5, num_warmup=100, temperature=1e-20)

    @jax.jit
    @jax.vmap
    def step(index):
        place = problem.initial(jr.key(0))
        state = SGState(place, None)
        return method.step(problem, state, index, jr.key(1))[0].place - place

    first, last = np.asarray(step(np.array([0, 300])))
    np.testing.assert_allclose(first / last, 2, rtol=1e-3)


def test_chains_start_at_the_end_of_the_descent():
    problem = bayes.Problem(LINEAR.target)
    place = jax.jit(lambda: bayes.SGLD(descent_steps=3000).init(problem, jr.key(0)).place)()
    np.testing.assert_allclose(place, LINEAR.mean, atol=1e-2)


# Chains forget their start in half as many steps as for `LINEAR`.
UNCORRELATED = LinearModel(correlation=0.0)
ONE_DRAW = {"num_samples": 1, "thin": 1, "chains": 1000, "descent_steps": 0}
SGLD = bayes.SGLD(step_size=0.01, num_warmup=600, **ONE_DRAW)
SGHMC = bayes.SGHMC(step_size=0.003, num_warmup=100, friction=0.3, trajectory_steps=8, **ONE_DRAW)


def stochastic(method, **settings):
    """Draws with minibatches, their covariance with full gradients, and the broadening."""
    method = dataclasses.replace(method, **settings)
    posterior = run(method, UNCORRELATED.target)
    covariance = UNCORRELATED.stationary_covariance(method)
    return posterior.records["draw"][:, 0], covariance, posterior.diagnostics.broadening


SLOW = dataclasses.replace(SGHMC, step_size=0.001, num_warmup=300)


@pytest.mark.parametrize(("method", "batch_size"), [(SGLD, 10), (SGHMC, 5), (SLOW, 1)])
def test_minibatches_leave_the_variance_unchanged(method, batch_size):
    draws, covariance, broadening = stochastic(method, batch_size=batch_size)
    assert broadening < 1.05
    check_moments(draws, UNCORRELATED.mean, covariance, len(draws))


def test_gradient_noise_does_not_widen_a_step_of_sgld():
    problem, place = bayes.Problem(LINEAR.target), jnp.asarray(LINEAR.mean)

    @jax.jit
    @jax.vmap
    def places(key):
        def one(batch_size, noise):
            method = bayes.SGLD(step_size=0.006, temperature=0.5, batch_size=batch_size)
            state = SGState(place, noise)
            return method.step(problem, state, jnp.asarray(0), jr.clone(key))[0].place

        return one(None, None), one(10, jnp.zeros(3))

    exact, noisy = (np.cov(each.T) for each in places(jr.split(jr.key(1), 40_000)))
    white = np.linalg.inv(np.linalg.cholesky(exact))
    # Without a correction, the largest factor would be 1.17.
    np.testing.assert_allclose(np.linalg.eigvalsh(white @ noisy @ white.T), 1, atol=0.03)


@pytest.mark.parametrize("method", [SGLD, SGHMC])
def test_too_much_gradient_noise_is_a_warning(method):
    settings = {"step_size": 2 * method.step_size, "temperature": 0.5, "batch_size": 2}
    text = "gradient noise of minibatches increases the var"
    with pytest.warns(bayes.InferenceWarning, match=text):
        draws, covariance, broadening = stochastic(method, **settings)
    white = np.linalg.solve(np.linalg.cholesky(covariance), draws.T)
    factor = np.linalg.eigvalsh(np.cov(white)).max()
    assert factor > 1.2
    np.testing.assert_allclose(broadening, factor, rtol=0.4)


def test_diverging_chains_are_a_warning():
    method = bayes.SGLD(num_samples=20, num_warmup=200, chains=2, step_size=10.0, descent_steps=0)
    with pytest.warns(
        bayes.InferenceWarning,
        match="SGLD: 2 of 2 chains diverged to infinity, and predictions",
    ):
        posterior = run(method)
    np.testing.assert_array_equal(posterior.diagnostics.lost, [20, 20])
    assert "lost: 20, 20" in str(posterior.diagnostics)
    assert posterior.diagnostics.outputs is None


# --- SWAG ---------------------------------------------------------------------------------------


def visited(method):
    """The positions that a method collects, and the result of its `finish`."""
    problem = bayes.Problem(LINEAR.target)

    @jax.jit
    def walk():
        def step(state, index):
            state, _ = method.step(problem, state, index, jr.fold_in(jr.key(1), index))
            return state, state.place

        state = method.init(problem, jr.key(0))
        state, places = jax.lax.scan(step, state, jnp.arange(method.num_steps))
        states = jax.tree.map(lambda each: each[None], state)
        return places, method.finish(problem, states, {}, jr.key(2))

    places, found = walk()
    index = np.arange(method.steps, method.num_steps)
    is_kept = (index - method.steps + 1) % method.collect_every == 0
    return np.asarray(places)[index[is_kept]], found


def test_swag_has_the_moments_of_the_collected_positions():
    method = bayes.SWAG(steps=5, batch_size=4, collect_steps=24, collect_every=3, rank=4)
    places, found = visited(method)
    assert len(places) == 8
    np.testing.assert_allclose(found.mean, places.mean(axis=0), rtol=1e-12)
    np.testing.assert_allclose(found.squares / found.count, places.var(axis=0), rtol=1e-10)
    means = np.cumsum(places, axis=0) / np.arange(1, 9)[:, None]
    deviations = (places - means)[-4:]
    np.testing.assert_allclose(found.deviations, deviations, rtol=1e-9)
    # The covariance is the mean of a diagonal and a low-rank matrix.
    expected = np.diag(places.var(axis=0)) / 2 + deviations.T @ deviations / (2 * 3)
    problem = bayes.Problem(LINEAR.target)
    draws = jax.jit(lambda: method.sample(problem, found, 20_000, jr.key(0)))()
    check_moments(np.asarray(draws), np.asarray(found.mean), expected, 20_000)


def test_fewer_positions_than_the_rank_are_all_kept():
    method = bayes.SWAG(steps=1, batch_size=4, collect_steps=6, collect_every=2, rank=20)
    problem = bayes.Problem(LINEAR.target)
    state = jax.eval_shape(lambda: method.init(problem, jr.key(0)))
    assert state.moments.deviations.shape == (3, 3)


# --- MC dropout ---------------------------------------------------------------------------------


class Masked(eqx.Module):
    """Returns the number of hidden units that a mask keeps, for each input."""

    scale: jax.Array
    dropout: nn.Dropout

    def __call__(self, x, *, key=None):
        return jnp.sum(self.dropout(self.scale, key=key)) + 0 * jnp.sum(x)


def test_all_inputs_share_the_mask_of_a_draw_and_draws_have_different_masks():
    model = Masked(jnp.ones(200), nn.Dropout(0.5))
    target = bayes.Posterior(model, bayes.normal(), bayes.Gaussian(0.5), (X, Y))
    chains = Chains(0, Optimised(np.ones((1, 200), np.float32), ()), {})
    posterior = fitted_from(bayes.Problem(target), bayes.MCDropout(), chains, jr.key(1))
    prediction = bayes.predict(posterior, X, key=jr.key(2), num_samples=8)
    assert isinstance(prediction, bayes.Mixture)
    outputs = np.asarray(prediction.components.mean)
    np.testing.assert_array_equal(outputs, np.broadcast_to(outputs[:, :1], outputs.shape))
    assert len(set(outputs[:, 0])) > 4
