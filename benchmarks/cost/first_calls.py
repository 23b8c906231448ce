"""The first call of each method, in CPU seconds of a fresh process.

`python -m benchmarks.cost.first_calls COLUMN` makes a first call and prints its CPU time, which
include tracing, compilation without a cache, and a short run.
"""

import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpyro.distributions as dist
import optax
from jax import Array

import eqxlike
from benchmarks import report
from benchmarks.cost.rows import Effort, Row
from benchmarks.cost.steps import target
from benchmarks.timing import Samples, round_orders, summarise
from eqxlike import bayes

TABLE = "A first call, CPU time of a fresh process"

MAP = "MAP by hand"
ELBO = "MeanField by hand"
STEPS = 50
METHODS = ("MAP", "Laplace", "MeanField", "DeepEnsemble", "EarlyStoppedEnsemble", "NUTS")
COLUMNS = (MAP, ELBO, *METHODS)


def rows() -> Iterator[Row]:
    """A small regression."""

    def measured(row: Row, effort: Effort) -> dict[str, Any]:
        times: dict[str, list[float]] = {column: [] for column in COLUMNS}
        for order in round_orders(COLUMNS, min(effort.runs, 3), seed=0):
            for column in order:
                command = [sys.executable, "-m", __name__, column]
                process = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
                times[column].append(1e6 * float(process.stdout.splitlines()[-1]))
        samples = {name: Samples(tuple(each), tuple(each), 1) for name, each in times.items()}
        return report.row(row.what, summarise(samples, MAP), []) | {"table": TABLE}

    yield Row(TABLE, "first call, 13-50-1, 512 examples", measured)


def by_hand(column: str, posterior: bayes.Posterior) -> Any:
    """The same network and steps, written by hand with JAX and Optax."""
    x, y = posterior.data
    start = (*jax.tree.leaves(eqxlike.filter(posterior.network, eqxlike.is_array)), jnp.zeros(()))
    num, noise_prior = len(y), dist.Gamma(2.0, 4.0)

    def log_likelihood(weights: Any) -> Array:
        first, shift, second, offset, log_scale = weights
        outputs = jax.nn.relu(x @ first.T + shift) @ second[0] + offset
        return dist.Normal(outputs, jnp.exp(log_scale)).log_prob(y).sum()

    def log_prior(weights: Any) -> Array:
        *parameters, log_scale = weights
        of_parameters = sum(dist.Normal(0.0, 1.0).log_prob(each).sum() for each in parameters)
        return of_parameters + noise_prior.log_prob(jnp.exp(log_scale)) + log_scale

    def loss_of_map(weights: Any, key: Array) -> Array:
        return -(log_likelihood(weights) + log_prior(weights)) / num

    def loss_of_elbo(place: Any, key: Array) -> Array:
        means, rhos = place
        keys = jax.random.split(key, len(means))
        scales = [jax.nn.softplus(rho) for rho in rhos]
        draw = [
            mean + scale * jax.random.normal(key, mean.shape)
            for key, mean, scale in zip(keys, means, scales, strict=True)
        ]
        entropy = sum(jnp.sum(jnp.log(scale)) for scale in scales)
        return -(log_likelihood(draw) + log_prior(draw) + entropy) / num

    place: Any = start if column == MAP else (start, jax.tree.map(lambda x: 0 * x - 3, start))
    loss: Any = loss_of_map if column == MAP else loss_of_elbo
    optimiser = optax.adam(optax.cosine_decay_schedule(0.01, STEPS))

    def step(carry: Any, key: Array) -> tuple[Any, Array]:
        place, state = carry
        value, gradient = jax.value_and_grad(loss)(place, key)
        updates, state = optimiser.update(gradient, state, place)
        return (optax.apply_updates(place, updates), state), value

    def run(place: Any, keys: Array) -> Any:
        return jax.lax.scan(step, (place, optimiser.init(place)), keys)

    return jax.jit(run)(place, jax.random.split(jax.random.key(0), STEPS))


def first_call(column: str) -> float:
    """The CPU seconds of the first call in this process."""
    posterior, key = target((13, 50, "scalar"), 512), jax.random.key(0)
    jax.block_until_ready(posterior.data)
    steps = {"num_warmup": STEPS, "num_samples": STEPS} if column == "NUTS" else {"steps": STEPS}
    before_s = time.process_time()
    if column in METHODS:
        method = getattr(bayes, column)(**steps)
        found = bayes.infer(posterior, method, key=key, progress=False).found
    else:
        found = by_hand(column, posterior)
    jax.block_until_ready(found)
    return time.process_time() - before_s


if __name__ == "__main__":
    warnings.simplefilter("ignore", bayes.InferenceWarning)
    jax.config.update("jax_enable_compilation_cache", False)
    print(first_call(sys.argv[1]))
