"""The models of a data set side by side: trained, evaluated, and what calls cost."""

import dataclasses
import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu

from .._pytree import combine, filter, is_array, partition
from .._timing import Call, Measurement, measure
from ._evaluate import Evaluation, baseline_name, evaluate, evaluate_baseline, evaluate_method
from ._models import Data, Example, Settings, Training, network_outputs, train_bayesian, train_plain

BAYESIAN = "bayesian"
PLAIN = "plain"


@dataclasses.dataclass
class Output:
    """The output for one data set, as far as it was reached.

    - `data`: the data set that was trained on.
    - `settings`: the settings of the trainings.
    - `bayesian`: the training of the Bayesian network.
    - `plain`: the training of the plain network; None if it was not reached.
    - `evaluations`: the evaluations that were reached, by name of the model.
    - `dispatch`: the dispatch table, by row; empty if it was not reached.
    - `seconds`: the seconds that all of it took.
    """

    data: Data
    settings: Settings
    bayesian: Training
    plain: Training | None = None
    evaluations: dict[str, Evaluation] = dataclasses.field(default_factory=dict)
    dispatch: dict[str, Measurement] = dataclasses.field(default_factory=dict)
    seconds: float = 0.0

    @property
    def trainings(self) -> dict[str, Training]:
        """The trainings that were reached, by name of the model."""
        pairs = ((BAYESIAN, self.bayesian), (PLAIN, self.plain))
        return {name: training for name, training in pairs if training is not None}


def compare(
    data: Data,
    settings: Settings,
    *,
    seed: int,
    outputs: dict[str, Output],
    methods: Sequence[str] = (),
) -> Output:
    """Trains a Bayesian and a plain network and the baseline, and evaluates them.

    A training that did not finish is reported on standard error, and what it reached is evaluated.

    **Arguments:**

    - `data`: the data set to train on and to evaluate with.
    - `settings`: the settings of the trainings.
    - `seed`: the seed of weights and noise.
    - `outputs`: gets the output under the name of the data set as soon as there is something in
      it, so that it is there when Ctrl-C ends the rest.
    - `methods`: names of further methods, see `METHODS`.

    **Returns:** the output.

    **Raises:** `KeyboardInterrupt` if Ctrl-C came, in a training or elsewhere.
    """
    bayesian = train_bayesian(data, settings, seed=seed)
    output = outputs[data.name] = Output(data, settings, bayesian)
    _evaluate(output, BAYESIAN, bayesian, seed, num_samples=settings.num_samples)
    output.plain = train_plain(data, settings, seed=seed)
    _evaluate(output, PLAIN, output.plain, seed, num_samples=1)
    output.evaluations[baseline_name(data)] = evaluate_baseline(data)
    for name in methods:
        output.evaluations[name] = evaluate_method(data, settings, name, seed=seed)
    return output


def _evaluate(
    output: Output, name: str, training: Training, seed: int, *, num_samples: int
) -> None:
    data, result = output.data, training.result
    if result.stopped != "finished":
        print(f"{data.name}, {name}: {result.message}", file=sys.stderr, flush=True)
    output.evaluations[name] = evaluate(data, training.model, seed=seed, num_samples=num_samples)
    if result.stopped == "interrupted":
        raise KeyboardInterrupt


# --- What a call costs: the demo's own training step and prediction, in three ways ---


PREDICTED = 32
"""The number of test examples in the prediction that is measured."""

FLAT = "jax.jit, flat list"
MODULE = "jax.jit, module"
FILTERED = "filter_jit"


def measure_dispatch(data: Data, training: Training, settings: Settings) -> dict[str, Measurement]:
    """Measures a training step, and a prediction for `PREDICTED` test examples.

    All three ways run the same operations. What differs is what a call costs around them.

    **Arguments:**

    - `data`: the data set to train on and to predict.
    - `training`: the training of the network; it stays as it is.
    - `settings`: the settings whose batch size, number of draws and rounds to use.

    **Returns:** the measurements, by name of the row; ratios are to `jax.jit` on the module.
    """
    batch = data.train[: settings.batch_size]
    example = Example(jnp.asarray(batch.x), jnp.asarray(batch.y))
    x, key = jnp.asarray(data.test.x[:PREDICTED]), jax.random.key(0)
    # Both are functions that `filter_jit` wrapped; the other columns take what is inside.
    rows = {
        "training step": _three_ways(training.step, training.result.state, example, is_step=True),
        "prediction": _three_ways(
            network_outputs, training.model.network, x, key, options=(settings.num_samples,)
        ),
    }
    # One key serves all calls: the calls are compared, not their numbers.
    with jax.debug_key_reuse(False):
        return {
            name: measure(calls, baseline=MODULE, rounds=settings.rounds)
            for name, calls in rows.items()
        }


def _three_ways(
    filtered: Any, tree: Any, *inputs: Any, options: tuple[Any, ...] = (), is_step: bool = False
) -> dict[str, Call]:
    """Calls `function(tree, *inputs, *options)` on a list of arrays, on a module, and filtered.

    **Arguments:**

    - `filtered`: the function as `filter_jit` wrapped it.
    - `options`: what is known when the function is compiled.
    - `is_step`: whether it returns the next tree and a loss. The tree is then donated and fed back;
      each way has a tree of its own.
    """
    arrays, static = partition(tree, is_array)
    leaves, treedef = jtu.tree_flatten(arrays)

    def on_module(arrays: Any, *inputs: Any) -> Any:
        outputs = filtered.__wrapped__(combine(arrays, static), *inputs, *options)
        return filter(outputs, is_array)

    def on_list(leaves: list[jax.Array], *inputs: Any) -> Any:
        outputs = on_module(jtu.tree_unflatten(treedef, leaves), *inputs)
        return (jtu.tree_leaves(outputs[0]), outputs[1]) if is_step else outputs

    donated = 0 if is_step else ()
    ways = {
        FLAT: (jax.jit(on_list, donate_argnums=donated), leaves, ()),
        MODULE: (jax.jit(on_module, donate_argnums=donated), arrays, ()),
        FILTERED: (filtered, tree, options),
    }

    def calling(function: Callable[..., Any], tree: Any, options: tuple[Any, ...]) -> Call:
        if not is_step:
            return lambda: function(tree, *inputs, *options)
        state = jtu.tree_map(lambda leaf: jnp.copy(leaf) if is_array(leaf) else leaf, tree)

        def call() -> jax.Array:
            nonlocal state
            state, loss = function(state, *inputs)
            return loss

        return call

    return {name: calling(*way) for name, way in ways.items()}
