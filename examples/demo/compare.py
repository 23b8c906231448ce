"""Trains and evaluates the models of a data set, and measures the cost of calls."""

import dataclasses
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import eqxlike as eqx

from .evaluate import Evaluation, evaluate, evaluate_logistic, evaluate_method, evaluate_ridge
from .training import Data, Settings, Training, network_outputs, train_bayesian, train_plain

BAYESIAN, PLAIN = "bayesian", "plain"


def compare(
    data: Data,
    settings: Settings,
    *,
    seed: int,
    reached: dict[str, Any],
    methods: Sequence[str] = (),
) -> dict[str, Any]:
    """Trains and evaluates a Bayesian network, a plain network and the baseline.

    An unfinished training is reported on standard error, and its last state is evaluated.

    **Arguments:**

    - `data`: the data set to train on and to evaluate with.
    - `settings`: the settings of the trainings.
    - `seed`: the seed of weights and noise.
    - `reached`: a dictionary. `compare` stores its results there, under the name of the data set,
      as soon as it has some, so that Ctrl-C does not lose them.
    - `methods`: names of further methods, see `METHODS`.

    **Returns:** the results, in the form that the report needs.

    **Raises:** `KeyboardInterrupt` after Ctrl-C, in a training or elsewhere.
    """
    start_s = time.perf_counter()
    bayesian = train_bayesian(data, settings, seed=seed)
    results = reached[data.name] = {
        "examples": {"train": len(data.train.y), "test": len(data.test.y)},
        "settings": dataclasses.asdict(settings),
        "elbo": [-loss for loss in bayesian.result.history],
        **{name: {} for name in ("trainings", "metrics", "reliability", "intervals", "dispatch")},
        "seconds": 0.0,
    }

    def keep(name: str, evaluation: Evaluation) -> None:
        results["metrics"][name] = {key: float(each) for key, each in evaluation.metrics.items()}
        results["intervals" if data.is_regression else "reliability"][name] = evaluation.shown

    def keep_training(name: str, training: Training, num_samples: int) -> None:
        result = training.result
        results["trainings"][name] = {
            "steps": len(result.history),
            "planned": training.planned,
            "stopped": result.stopped,
            "message": result.message,
        }
        if result.stopped != "finished":
            print(f"{data.name}, {name}: {result.message}", file=sys.stderr, flush=True)
        keep(name, evaluate(data, result.state.model, seed=seed, num_samples=num_samples))
        if result.stopped == "interrupted":
            raise KeyboardInterrupt

    keep_training(BAYESIAN, bayesian, settings.num_samples)
    keep_training(PLAIN, train_plain(data, settings, seed=seed), 1)
    baselines = {"diabetes": ("ridge", evaluate_ridge), "digits": ("logistic", evaluate_logistic)}
    name, evaluate_baseline = baselines[data.name]
    keep(name, evaluate_baseline(data))
    for name in methods:
        keep(name, evaluate_method(data, settings, name, seed=seed))
    if settings.rounds:
        results["dispatch"] = measure_calls(data, bayesian, settings)
    results["seconds"] = time.perf_counter() - start_s
    return results


# --- The cost of the demo's training step and prediction, called in three ways ---


PREDICTED = 32
"""The number of test examples in the prediction that is measured."""

CALLS, TARGET_S = 8, 0.002
"""Each way makes at most `CALLS` calls in a row, and fewer if they take `TARGET_S` seconds."""

FLAT, MODULE, FILTERED = "jax.jit, flat list", "jax.jit, module", "filter_jit"

Call = Callable[[], jax.Array]


def measure_calls(data: Data, training: Training, settings: Settings) -> dict[str, Any]:
    """Measures a training step and a prediction, each called in three ways.

    The prediction is for `PREDICTED` test examples. The three ways run the same operations. They
    take turns, and each turn gives one ratio to `jax.jit` on the module, so that other load on the
    machine cancels.

    **Arguments:**

    - `data`: the data set to train on and to predict.
    - `training`: the training of the network, which is not changed.
    - `settings`: the settings whose batch size, number of draws and rounds to use.

    **Returns:** for each row, the name of the `baseline` and the `columns` by name.
    """
    batch = jax.tree.map(lambda each: jnp.asarray(each[: settings.batch_size]), data.train)
    x, key = jnp.asarray(data.test.x[:PREDICTED]), jax.random.key(0)
    network, samples = training.result.state.model.network, settings.num_samples
    # Both functions are wrapped by `filter_jit`. The other two ways call the functions inside the
    # wrappers.
    rows = {
        "training step": _ways(training.step, training.result.state, batch, is_step=True),
        "prediction": _ways(network_outputs, network, x, key, options=(samples,)),
    }
    # All calls use the same key: only their times are compared.
    with jax.debug_key_reuse(False):
        return {
            name: {"baseline": MODULE, "columns": _columns(ways, settings.rounds)}
            for name, ways in rows.items()
        }


def _ways(
    filtered: Any, tree: Any, *inputs: Any, options: tuple[Any, ...] = (), is_step: bool = False
) -> dict[str, Call]:
    """Makes three functions to time: `jax.jit` on a list of arrays or a module, and `filter_jit`.

    **Arguments:**

    - `filtered`: the function wrapped by `filter_jit`, called as `filtered(tree, *inputs,
      *options)`.
    - `options`: the static arguments.
    - `is_step`: whether `function` returns the next tree and a loss. If True, each way has its own
      tree: a call donates the tree, and the next call gets the returned tree.
    """
    arrays, static = eqx.partition(tree, eqx.is_array)
    leaves, treedef = jax.tree.flatten(arrays)

    def on_module(arrays: Any, *inputs: Any) -> Any:
        outputs = filtered.__wrapped__(eqx.combine(arrays, static), *inputs, *options)
        return eqx.filter(outputs, eqx.is_array)

    def on_list(leaves: list[jax.Array], *inputs: Any) -> Any:
        outputs = on_module(jax.tree.unflatten(treedef, leaves), *inputs)
        return (jax.tree.leaves(outputs[0]), outputs[1]) if is_step else outputs

    def calling(function: Callable[..., Any], tree: Any, *options: Any) -> Call:
        if not is_step:
            return lambda: function(tree, *inputs, *options)
        state = jax.tree.map(lambda leaf: jnp.copy(leaf) if eqx.is_array(leaf) else leaf, tree)

        def call() -> jax.Array:
            nonlocal state
            state, loss = function(state, *inputs)
            return loss

        return call

    donated = 0 if is_step else ()
    return {
        FLAT: calling(jax.jit(on_list, donate_argnums=donated), leaves),
        MODULE: calling(jax.jit(on_module, donate_argnums=donated), arrays),
        FILTERED: calling(filtered, tree, *options),
    }


def _columns(ways: Mapping[str, Call], rounds: int) -> dict[str, dict[str, Any]]:
    for call in ways.values():  # The first calls compile.
        _times_us(call, CALLS)
    slowest_s = 1e-6 * max(sum(_times_us(call, 1)) for call in ways.values())
    calls, columns = min(CALLS, max(1, round(TARGET_S / slowest_s))), {}
    turns = [[_times_us(call, calls) for call in ways.values()] for _ in range(rounds)]
    times = dict(zip(ways, np.moveaxis(np.array(turns), 0, -1), strict=True))
    for name in ways:
        column: dict[str, Any] = {"rounds": rounds, "calls": calls}
        for place, kind in enumerate(("dispatch", "completion")):
            quartiles = np.quantile(times[name][place] / times[MODULE][place], [0.25, 0.5, 0.75])
            column[f"{kind}_us"] = np.median(times[name][place])
            column[f"{kind}_ratio"] = dict(
                zip(("lower", "median", "upper"), quartiles, strict=True)
            )
        columns[name] = column
    return columns


def _times_us(call: Call, count: int) -> tuple[float, float]:
    """Microseconds until a call returns, and until its result is ready."""
    call().block_until_ready()  # warms the caches that the previous call replaced
    start_s = time.perf_counter()
    results = [call() for _ in range(count)]
    returned_s = time.perf_counter() - start_s
    jax.block_until_ready(results)
    start_s = time.perf_counter()
    for _ in range(count):
        call().block_until_ready()
    return 1e6 * returned_s / count, 1e6 * (time.perf_counter() - start_s) / count
