"""NUTS compared with a simple sampler, which runs one chain and loops over lists."""

import sys
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from scipy import stats

from eqxlike import bayes
from eqxlike.bayes._methods._markov_chains import HMCState
from eqxlike.bayes._methods._nuts import _random_numbers
from eqxlike.nn._parameters import threefry
from tests.bayes.methods.cases import run

pytestmark = pytest.mark.usefixtures("as_methods_run")

SIZE, CHAINS, DRAWS = 3, 4, 40
# With the last step size, some trajectories diverge.
STEP_SIZES = np.array([0.04, 0.3, 0.6, 2.5])


def funnel(place):
    log_scale, others = place[0], place[1:]
    return -0.5 * log_scale**2 - 0.5 * jnp.sum(jnp.exp(-log_scale) * others**2 + log_scale)


def started(method, key):
    problem = SimpleNamespace(size=SIZE, dtype=jnp.zeros(()).dtype, log_density=funnel)
    places = jr.normal(key, (CHAINS, SIZE))
    matrix = jnp.diag(jnp.array([0.5, 1.0, 2.0])) + 0.2
    matrix = matrix if method.dense_mass else jnp.diagonal(matrix)
    densities = jax.vmap(jax.value_and_grad(funnel))(places)
    matrices = jnp.broadcast_to(matrix, (CHAINS, *matrix.shape))
    return problem, HMCState(places, *densities, jnp.asarray(STEP_SIZES), matrices, (), ())


def plain_draws(state, chain, seeds, normals, max_doublings):
    value_and_gradient = jax.jit(jax.value_and_grad(funnel))
    step_size, matrix = STEP_SIZES[chain], np.asarray(state.inverse_mass_matrix[chain])
    dense = np.diag(matrix) if matrix.ndim == 1 else matrix
    place, value, gradient = (np.asarray(each[chain]) for each in state[:3])

    def turns(steps, momenta):
        inside = sum(momenta) - 0.5 * (steps[0][1] + steps[-1][1])
        return any(inside @ dense @ step[1] <= 0 for step in (steps[0], steps[-1]))

    for seed, normal in zip(seeds, normals, strict=True):
        momentum = np.linalg.solve(np.linalg.cholesky(dense).T, normal)
        energy = 0.5 * momentum @ dense @ momentum - value
        trajectory, log_weight = [(place, momentum, gradient)], 0.0
        sample, acceptances = (place, value, gradient, energy), []
        is_right, diverged = seed[2] & 1, False
        for depth in range(max_doublings):
            here, sign = trajectory[-1 if is_right else 0], 1 if is_right else -1
            subtree, proposal, subtree_log_weight, stopped = [], None, -np.inf, False
            while len(subtree) < 2**depth and not stopped:
                place, momentum, gradient = here
                momentum = momentum + 0.5 * sign * step_size * gradient
                place = place + sign * step_size * dense @ momentum
                value, gradient = map(np.asarray, value_and_gradient(place))
                momentum = momentum + 0.5 * sign * step_size * gradient
                here = place, momentum, gradient
                new_energy = 0.5 * momentum @ dense @ momentum - value
                gain = energy - new_energy if np.isfinite(new_energy) else -np.inf
                subtree_log_weight = np.logaddexp(subtree_log_weight, gain)
                chance = random(seed, len(subtree), depth)[0]
                if chance < np.exp(gain - subtree_log_weight):
                    proposal = place, value, gradient, new_energy
                subtree.append(here)
                acceptances.append(np.exp(min(gain, 0)))
                diverged = gain < -1000
                sizes = [2**k for k in range(1, depth + 1) if len(subtree) % 2**k == 0]
                lasts = [subtree[-size:] for size in sizes]
                stopped = diverged or any(turns(each, [step[1] for step in each]) for each in lasts)
            trajectory = [*trajectory, *subtree] if is_right else [*subtree[::-1], *trajectory]
            if stopped:
                break
            chance, is_right = random(seed, len(subtree), depth)
            if chance < np.exp(subtree_log_weight - log_weight):
                sample = proposal
            log_weight = np.logaddexp(log_weight, subtree_log_weight)
            if turns(trajectory, [step[1] for step in trajectory]):
                break
        place, value, gradient, energy = sample
        yield *place, value, energy, np.mean(acceptances), diverged, len(acceptances)


def random(seed, size, depth):
    first, second = threefry(*seed[:2], np.array([size], np.uint32), np.array([depth], np.uint32))
    return (int(first[0]) >> 8) / 2**24, int(second[0]) & 1


@pytest.mark.parametrize("dense_mass", [False, True])
def test_draws_equal_draws_of_a_simple_sampler(dense_mass):
    method = bayes.NUTS(num_warmup=0, dense_mass=dense_mass, max_doublings=6)
    problem, state = started(method, jr.key(0))
    keys = jr.split(jr.key(1), CHAINS)
    buffers = {"draw": jnp.zeros((CHAINS, DRAWS, SIZE))}
    advance = jax.jit(lambda state: method.advance(problem, state, keys, 0, DRAWS, buffers))
    _, records = advance(state)
    assert np.sum(records["is_divergent"]) > 0
    assert np.max(records["num_gradients"]) == 2**6 - 1
    names = "log_density", "energy", "acceptance", "is_divergent", "num_gradients"
    found = jnp.stack([*jnp.moveaxis(records["draw"], -1, 0), *map(records.get, names)], axis=-1)
    seeds, normals = map(np.asarray, _random_numbers(keys, jnp.arange(DRAWS), problem))
    expected = [
        list(plain_draws(state, chain, seeds[chain], normals[chain], 6)) for chain in range(CHAINS)
    ]
    np.testing.assert_allclose(found, np.array(expected), rtol=1e-9, atol=1e-9)


@pytest.mark.filterwarnings("ignore::eqxlike.bayes.InferenceWarning")
def test_chains_adapt_independently_and_without_blackjax(monkeypatch):
    monkeypatch.setitem(sys.modules, "blackjax", None)
    method = bayes.NUTS(num_samples=10, num_warmup=60, chains=3, dense_mass=True)
    together, apart = (run(method, chain_method=each) for each in ("vectorized", "sequential"))
    for name, each in together.records.items():
        np.testing.assert_allclose(each, apart.records[name], rtol=1e-4, atol=1e-6)
    step_sizes = together.chains.states.step_size
    assert len(np.unique(step_sizes)) == 3
    np.testing.assert_allclose(step_sizes, apart.chains.states.step_size, rtol=1e-4)
    with pytest.raises(ImportError, match="This method needs BlackJAX"):
        run(bayes.HMC(num_samples=5))


class Halved(bayes.NUTS):
    def step(self, problem, state, index, key):
        state, record = super().step(problem, state, index, key)
        return state, record | {"half": 0.5 * record["draw"]}


@pytest.mark.filterwarnings("ignore::eqxlike.bayes.InferenceWarning")
def test_subclass_of_nuts_runs_its_own_step_with_a_raw_key():
    method = Halved(num_samples=5, num_warmup=5, chains=2)
    posterior = run(method, key=jr.PRNGKey(0))
    np.testing.assert_array_equal(posterior.records["half"], 0.5 * posterior.records["draw"])


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_momenta_are_normal(dtype):
    problem = SimpleNamespace(size=50, dtype=np.dtype(dtype))
    keys, numbers = jr.split(jr.key(2), 3), jnp.arange(7, 407)
    seeds, normals = jax.jit(lambda keys: _random_numbers(keys, numbers, problem))(keys)
    assert normals.dtype == dtype
    assert len(np.unique(seeds)) == seeds.size == 3 * 400 * 3
    assert len(np.unique(normals)) > 0.99 * normals.size
    assert stats.kstest(np.asarray(normals).ravel(), "norm").pvalue > 0.01
    correlations = np.corrcoef(np.asarray(normals).reshape(1200, 50).T) - np.eye(50)
    assert np.abs(correlations).max() < 5 / np.sqrt(1200)
    later = _random_numbers(keys, numbers[5:6], problem)
    np.testing.assert_array_equal(later[0][:, 0], seeds[:, 5])
    np.testing.assert_allclose(later[1][:, 0], normals[:, 5], rtol=1e-6)
