"""The cost of `filter_jit` in the demo: its own training step and prediction, in three ways.

All three run the same operations. What differs is what a call costs around them.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu

from .._pytree import combine, filter, is_array, partition
from .._timing import Call, Measurement, measure
from ._data import Data
from ._models import Example, Settings, network_outputs
from ._train import Training

PREDICTED = 32
"""The number of test examples in the prediction that is measured."""

FLAT = "jax.jit, flat list"
MODULE = "jax.jit, module"
FILTERED = "filter_jit"


def measure_dispatch(data: Data, training: Training, settings: Settings) -> dict[str, Measurement]:
    """Measures a training step, and a prediction for `PREDICTED` test examples.

    **Arguments:**

    - `data`: the data set to train on and to predict.
    - `training`: the training of the network; it stays as it is.
    - `settings`: the settings whose batch size, number of draws and rounds to use.

    **Returns:** the measurements, by name of the row; ratios are to `jax.jit` on the module.
    """
    batch = data.train[: settings.batch_size]
    example = Example(jnp.asarray(batch.x), jnp.asarray(batch.y))
    x, key = jnp.asarray(data.test.x[:PREDICTED]), jax.random.key(0)
    num_samples = settings.num_samples
    # Both are functions that `filter_jit` wrapped; the other columns take what is inside.
    step, predict = training.step, network_outputs
    rows = {
        "training step": _steps(step, training.result.state, example),
        "prediction": _predictions(predict, training.model.network, x, key, num_samples),
    }
    # One key serves all calls: the calls are compared, not their numbers.
    with jax.debug_key_reuse(False):
        return {
            name: measure(calls, baseline=MODULE, rounds=settings.rounds)
            for name, calls in rows.items()
        }


def _steps(step: Any, state: Any, example: Example) -> dict[str, Call]:
    """Training steps, the state donated and fed back; each column trains a state of its own."""
    inner = step.__wrapped__
    static = filter(state, is_array, inverse=True)
    treedef = jtu.tree_structure(filter(state, is_array))

    def on_module(arrays: Any, example: Example) -> tuple[Any, jax.Array]:
        state, loss = inner(combine(arrays, static), example)
        return filter(state, is_array), loss

    def on_list(leaves: list[jax.Array], example: Example) -> tuple[list[jax.Array], jax.Array]:
        arrays, loss = on_module(jtu.tree_unflatten(treedef, leaves), example)
        return jtu.tree_leaves(arrays), loss

    arrays = filter(_copy(state), is_array)
    leaves = jtu.tree_leaves(filter(_copy(state), is_array))
    return {
        FLAT: _fed_back(jax.jit(on_list, donate_argnums=0), leaves, example),
        MODULE: _fed_back(jax.jit(on_module, donate_argnums=0), arrays, example),
        FILTERED: _fed_back(step, _copy(state), example),
    }


def _fed_back(step: Callable[..., Any], state: Any, example: Example) -> Call:
    def call() -> jax.Array:
        nonlocal state
        state, loss = step(state, example)
        return loss

    return call


def _copy(state: Any) -> Any:
    """The same tree with arrays of its own, to be donated."""
    return jtu.tree_map(lambda leaf: jnp.copy(leaf) if is_array(leaf) else leaf, state)


def _predictions(
    predict: Any, network: Any, x: jax.Array, key: jax.Array, num_samples: int
) -> dict[str, Call]:
    """Predictions, the number of draws known when they are compiled."""
    inner = predict.__wrapped__
    arrays, static = partition(network, is_array)
    leaves, treedef = jtu.tree_flatten(arrays)

    @jax.jit
    def on_module(arrays: Any, x: jax.Array, key: jax.Array) -> jax.Array:
        return inner(combine(arrays, static), x, key, num_samples)

    @jax.jit
    def on_list(leaves: list[jax.Array], x: jax.Array, key: jax.Array) -> jax.Array:
        network = combine(jtu.tree_unflatten(treedef, leaves), static)
        return inner(network, x, key, num_samples)

    return {
        FLAT: lambda: on_list(leaves, x, key),
        MODULE: lambda: on_module(arrays, x, key),
        FILTERED: lambda: predict(network, x, key, num_samples),
    }
