"""Steps of variational inference compared with the plain training step."""

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import optax
from jax import Array

import eqxlike
from benchmarks import columns, networks
from benchmarks.cases import Case
from benchmarks.columns import Work
from benchmarks.cost.rows import Row, row_of_case
from benchmarks.timing import Call
from eqxlike import bayes, nn

INFERENCE = "A step of Adam in bayes.infer"
BY_HAND = "A step of Adam written by hand"

MAP = "MAP"
PLAIN = "log likelihood"
ESTIMATORS: Sequence[Any] = ("local", "flipout", "weights")

BATCH = 128
EXAMPLES = 2048
SIZES = ((13, 50, "scalar"), (784, 32, 10))


def rows() -> Iterator[Row]:
    """Each network with `bayes.MeanField`, and with `bayes.negative_elbo`."""
    for sizes in SIZES:
        builders = {MAP: functools.partial(_inferring, sizes, bayes.MAP)} | {
            f"MeanField, {each}": functools.partial(
                _inferring, sizes, functools.partial(bayes.MeanField, estimator=each)
            )
            for each in ESTIMATORS
        }
        yield row_of_case(INFERENCE, Case(_name(sizes), builders, MAP))
    for sizes in SIZES:
        builders = {PLAIN: functools.partial(_training, sizes, None)} | {
            f"negative_elbo, {each}": functools.partial(_training, sizes, each)
            for each in ESTIMATORS
        }
        yield row_of_case(BY_HAND, Case(_name(sizes), builders, PLAIN))


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
    return columns.filtered(bound)


def _training(sizes: Sequence[Any], estimator: Any) -> Call:
    """The step of the plain network, or of a Bayesian network with this estimator."""
    model: Any = network(sizes)
    if estimator is not None:
        model = nn.to_bayesian(model, estimator=estimator)
    loss = functools.partial(_loss if estimator is None else _elbo, sizes[-1] == "scalar")
    arguments = (jax.random.key(1), *data(sizes, BATCH))
    state = networks.training_state(eqxlike, model)
    step = networks.training_step(eqxlike, loss)
    return columns.filtered(Work(eqxlike, step, state, arguments, feeds_back=True))


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
