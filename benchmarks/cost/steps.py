"""Steps of variational inference compared with the plain training step, a whole ensemble compared
with one network, and the first call of each method in CPU seconds of a fresh process.
"""

import argparse
import functools
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import optax
from jax import Array

import eqxlike
from benchmarks import cases, networks, report
from benchmarks.cases import Case, Work
from benchmarks.command import OwnRow, Row
from benchmarks.report import Table
from benchmarks.timing import Call, in_process, interleaved, measure_first_calls, of_seconds
from eqxlike import bayes, nn

INFERENCE = Table("A step of Adam in bayes.infer", unit="microseconds")
BY_HAND = Table("A step of Adam written by hand", unit="microseconds")

MAP = "MAP"
PLAIN = "log likelihood"
ESTIMATORS: Sequence[Any] = ("local", "flipout", "weights")

BATCH = 128
EXAMPLES = 2048
SIZES = ((13, 50, "scalar"), (784, 32, 10))


def step_rows() -> Iterator[Row]:
    """Each network with `bayes.MeanField`, and with `bayes.negative_elbo`."""
    for sizes in SIZES:
        builders = {MAP: functools.partial(_inferring, sizes, bayes.MAP)} | {
            f"MeanField, {each}": functools.partial(
                _inferring, sizes, functools.partial(bayes.MeanField, estimator=each)
            )
            for each in ESTIMATORS
        }
        yield Row(INFERENCE, Case(_name(sizes), builders, MAP), lambda calls: None)
    for sizes in SIZES:
        builders = {PLAIN: functools.partial(_training, sizes, None)} | {
            f"negative_elbo, {each}": functools.partial(_training, sizes, each)
            for each in ESTIMATORS
        }
        yield Row(BY_HAND, Case(_name(sizes), builders, PLAIN), lambda calls: None)


def _name(sizes: Sequence[Any]) -> str:
    return f"{network_name(sizes)}, batch {BATCH}"


def network_name(sizes: Sequence[Any]) -> str:
    """The sizes of the layers, for example `13-50-1`."""
    return "-".join("1" if each == "scalar" else str(each) for each in sizes)


def network(sizes: Sequence[Any]) -> nn.MLP:
    """An MLP with ReLU whose hidden layers have the same width."""
    features, width, *_, outputs = sizes
    return nn.MLP(features, outputs, width_size=width, depth=len(sizes) - 2, key=jax.random.key(0))


def data(sizes: Sequence[Any], num: int) -> tuple[Array, Array]:
    """Inputs, and numbers or classes as targets."""
    features, *_, outputs = sizes
    x = networks.normal(num, features, seed=1)
    if outputs == "scalar":
        return x, networks.normal(num, seed=2)
    return x, jnp.asarray(np.random.default_rng(2).integers(0, outputs, num))


def target(sizes: Sequence[Any], num: int) -> bayes.Posterior:
    """A regression with unknown noise, or a classification."""
    is_regression = sizes[-1] == "scalar"
    likelihood = bayes.Gaussian(dist.Gamma(2.0, 4.0)) if is_regression else bayes.Categorical()
    return bayes.Posterior(network(sizes), bayes.normal(0.0, 1.0), likelihood, data(sizes, num))


def _inferring(sizes: Sequence[Any], kind: Callable[..., bayes.MAP | bayes.MeanField]) -> Call:
    """The step of a method in `bayes.infer`."""
    method = kind(optimiser=networks.optimiser(), batch_size=BATCH)
    problem = bayes.Problem(target(sizes, EXAMPLES))
    index, key = jnp.zeros((), jnp.int32), jax.random.key(1)
    with jax.debug_key_reuse(False):
        state = eqxlike.filter_jit(method.init)(problem, jax.random.key(0))

    def step(state: Any, problem: bayes.Problem, index: Array, key: Array) -> tuple[Any, Array]:
        state, record = method.step(problem, state, index, key)
        return state, record["loss"]

    bound = Work(eqxlike, step, (state,), (problem, index, key), feeds_back=True)  # pyright: ignore
    return cases.filtered(bound)


def _training(sizes: Sequence[Any], estimator: Any) -> Call:
    """The step of the plain network, or of a Bayesian network with this estimator."""
    model: Any = network(sizes)
    if estimator is not None:
        model = nn.to_bayesian(model, estimator=estimator)
    loss = functools.partial(_loss if estimator is None else _elbo, sizes[-1] == "scalar")
    arguments = (jax.random.key(1), *data(sizes, BATCH))
    state = networks.training_state(eqxlike, model)
    step = networks.training_step(eqxlike, loss)
    return cases.filtered(Work(eqxlike, step, state, arguments, feeds_back=True))


def _log_likelihood(is_regression: bool, model: Any, example: Any, key: Array | None) -> Array:
    x, y = example
    output = model(x, key=key)
    if is_regression:
        return -((y - output) ** 2) / 2
    return -optax.softmax_cross_entropy_with_integer_labels(output, y)


def _loss(is_regression: bool, model: Any, key: Array, x: Array, y: Array) -> Array:
    each = jax.vmap(lambda x, y: _log_likelihood(is_regression, model, (x, y), None))
    return -jnp.mean(each(x, y))


def _elbo(is_regression: bool, model: Any, key: Array, x: Array, y: Array) -> Array:
    log_likelihood = functools.partial(_log_likelihood, is_regression)
    return bayes.negative_elbo(
        model, log_likelihood, (x, y), num_data=EXAMPLES, key=key, per_example=True
    )


# --- whole runs ---

RUN = Table("A whole run")

TOGETHER = "DeepEnsemble"
APART = "DeepEnsemble, sequential"
DEFAULT = "DeepEnsemble, default"

MEMBERS = 10
SMALL = (13, 50, "scalar")
FULL_BATCHES = (
    (SMALL, 500, 1),
    ((13, 50, 50, "scalar"), 2000, 5),
    ((13, 200, 200, "scalar"), 2000, 20),
)
"""Sizes of the layers, numbers of examples, and divisors of the number of steps."""


def run_rows() -> Iterator[OwnRow]:
    """Steps on minibatches, and steps on all data."""
    for batch_size in (32, 128):
        yield _run_row(SMALL, 512, batch_size)
    for sizes, examples, fewer in FULL_BATCHES:
        yield _run_row(sizes, examples, None, fewer)


def _run_row(sizes: Sequence[Any], examples: int, batch_size: int | None, fewer: int = 1) -> OwnRow:
    def measured(options: argparse.Namespace) -> dict[str, Any]:
        posterior, steps = target(sizes, examples), options.steps // fewer
        one = bayes.MAP(steps=steps, batch_size=batch_size)
        many = bayes.DeepEnsemble(steps=steps, batch_size=batch_size, members=MEMBERS)

        def run(method: bayes.Method, chain_method: Any) -> Call:
            return lambda: (
                bayes.infer(
                    posterior,
                    method,
                    key=jax.random.key(0),
                    progress=False,
                    chain_method=chain_method,
                ).found
            )

        found = measure_first_calls(
            {
                MAP: lambda: run(one, "vectorized"),
                TOGETHER: lambda: run(many, "vectorized"),
                APART: lambda: run(many, "sequential"),
                DEFAULT: lambda: run(many, None),
            },
            baseline=MAP,
            rounds=options.runs,
        )
        return report.row(name, found, table=RUN.title)

    batch = f"all {examples}" if batch_size is None else str(batch_size)
    name = f"{network_name(sizes)}, {batch} examples a step"
    return OwnRow(f"{RUN.title}; {name}", RUN.title, measured)


# --- first calls ---

FIRST_CALL = Table("A first call, CPU time of a fresh process")

MAP_BY_HAND, ELBO_BY_HAND = "MAP by hand", "MeanField by hand"
NUM_STEPS = 50
METHODS = ("MAP", "Laplace", "MeanField", "DeepEnsemble", "EarlyStoppedEnsemble", "NUTS")
COLUMNS = (MAP_BY_HAND, ELBO_BY_HAND, *METHODS)
TIMED = "from benchmarks.cost import steps; steps.print_first_call({!r})"


def first_call_rows() -> Iterator[OwnRow]:
    """A small regression."""
    name = "first call, 13-50-1, 512 examples"

    def measured(options: argparse.Namespace) -> dict[str, Any]:
        turns = {
            column: functools.partial(in_process, "-c", TIMED.format(column)) for column in COLUMNS
        }
        times_s = interleaved(turns, min(options.runs, 3))
        return report.row(name, of_seconds(times_s, MAP_BY_HAND), table=FIRST_CALL.title)

    yield OwnRow(f"{FIRST_CALL.title}; {name}", FIRST_CALL.title, measured)


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

    place: Any = (
        start if column == MAP_BY_HAND else (start, jax.tree.map(lambda x: 0 * x - 3, start))
    )
    loss: Any = loss_of_map if column == MAP_BY_HAND else loss_of_elbo
    optimiser = optax.adam(optax.cosine_decay_schedule(0.01, NUM_STEPS))

    def step(carry: Any, key: Array) -> tuple[Any, Array]:
        place, state = carry
        value, gradient = jax.value_and_grad(loss)(place, key)
        updates, state = optimiser.update(gradient, state, place)
        return (optax.apply_updates(place, updates), state), value

    def run(place: Any, keys: Array) -> Any:
        return jax.lax.scan(step, (place, optimiser.init(place)), keys)

    return jax.jit(run)(place, jax.random.split(jax.random.key(0), NUM_STEPS))


def print_first_call(column: str) -> None:
    """Prints the CPU seconds of the first call in this process: of tracing, of compiling without a
    cache, and of a short run.
    """
    warnings.simplefilter("ignore", bayes.InferenceWarning)
    jax.config.update("jax_enable_compilation_cache", False)
    posterior, key = target((13, 50, "scalar"), 512), jax.random.key(0)
    jax.block_until_ready(posterior.data)
    steps = (
        {"num_warmup": NUM_STEPS, "num_samples": NUM_STEPS}
        if column == "NUTS"
        else {"steps": NUM_STEPS}
    )
    before_s = time.process_time()
    if column in METHODS:
        method = getattr(bayes, column)(**steps)
        found = bayes.infer(posterior, method, key=key, progress=False).found
    else:
        found = by_hand(column, posterior)
    jax.block_until_ready(found)
    print(time.process_time() - before_s)
