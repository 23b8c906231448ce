"""The cost of a training loop: `train.fit` compared with hand-written loops.

Each call trains an MLP with Adam on the same NumPy batches, from the same weights, until all losses
are on the host. "By hand" is a loop over `jax.jit` of a flat list of donated arrays, with a key
that each step splits. `fit` runs with its defaults, including the check that the state is finite,
and with a step made with `check_finite=False`. The loops of Equinox and NNX come from their
documentation. Keras runs on JAX, if it is installed. A check before timing ensures that all columns
have the same mean loss. `benchmarks.timing` describes the method. Ctrl-C prints the finished rows.

The last rows compare runs with and without `train.prefetch`, in a loop that reads each loss and in
`fit`. Batches are ready or take 2 ms each. The name of a row states the approximate time of a step.
"""

import functools
import importlib
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import eqxlike
from benchmarks import command, networks, report
from benchmarks.cases import Case
from benchmarks.timing import Call
from eqxlike import train

NAME = "benchmarks.training"
ROUNDS = command.Rounds(default=30, quick=7)

BY_HAND = "by hand"
SCAN = "by hand, a scan of 16 steps"
FIT = "fit"
UNCHECKED = "fit, unchecked"
MANY = "fit, 16 steps a call"
MANY_UNCHECKED = "fit, 16 steps a call, unchecked"
AHEAD = "fit, 16 steps a call, prefetch"
EQUINOX = "Equinox"
NNX = "NNX"
KERAS = "Keras on JAX, 16 steps a call"
NO_PREFETCH = "no prefetch"
PREFETCH = "prefetch"

BATCH = 32

LIMITS = {"2x8": 0.38, "3x24": 0.45, "10x32": 0.55, "48x8": 0.50, "6x256": 0.85, "4x1024": 1.0}
"""The targets for 16 steps in a call, relative to a hand-written loop."""

Batches = Sequence[tuple[np.ndarray, np.ndarray]]


def num_steps(width: int) -> int:
    """The number of steps of a run."""
    return 256 if width < 256 else 48


@functools.cache
def batches(width: int) -> Batches:
    """The batches of a run."""
    draw = np.random.default_rng(1).normal
    shape = BATCH, width
    return [
        (draw(size=shape).astype(np.float32), draw(size=shape).astype(np.float32))
        for _ in range(num_steps(width))
    ]


def by_hand(width: int, depth: int, steps_per_call: int = 1) -> Call:
    """A loop over `jax.jit` of a flat list of arrays and a key, which each step splits.

    With more than one step in a call, the jitted function is a `lax.scan` over stacked batches.
    """
    optimiser = networks.optimiser()
    treedef = jax.tree_util.tree_structure(_start(width, depth, optimiser))

    def loss(arrays: Sequence[jax.Array], x: jax.Array, y: jax.Array) -> jax.Array:
        *hidden, (weight, bias) = zip(arrays[::2], arrays[1::2], strict=True)
        for each_weight, each_bias in hidden:
            x = jax.nn.relu(x @ each_weight.T + each_bias[None])
        return jnp.mean((x @ weight.T + bias[None] - y) ** 2)

    def one(leaves: list[jax.Array], x: jax.Array, y: jax.Array) -> tuple[list, jax.Array]:
        *leaves, key = leaves
        arrays, state = treedef.unflatten(leaves)
        value, gradients = jax.value_and_grad(loss)(arrays, x, y)
        updates, state = optimiser.update(gradients, state)
        new = optax.apply_updates(arrays, updates), state
        return [*jax.tree_util.tree_leaves(new), jax.random.split(key)[0]], value

    def many(leaves: list[jax.Array], x: jax.Array, y: jax.Array) -> tuple[list, jax.Array]:
        return jax.lax.scan(lambda leaves, batch: one(leaves, *batch), leaves, (x, y))

    step = jax.jit(one if steps_per_call == 1 else many, donate_argnums=0)

    def call() -> np.floating:
        leaves = jax.tree_util.tree_leaves(_start(width, depth, optimiser))
        leaves.append(jax.random.key(0))
        losses = []
        for start in range(0, num_steps(width), steps_per_call):
            some = batches(width)[start : start + steps_per_call]
            x, y = some[0] if steps_per_call == 1 else map(np.stack, zip(*some, strict=True))
            leaves, value = step(leaves, x, y)
            losses.append(value)
        return np.mean(jax.device_get(losses))

    return call


def _start(width: int, depth: int, optimiser: optax.GradientTransformation) -> tuple[list, Any]:
    arrays = [jnp.asarray(each) for each in networks.weights([width] * (depth + 2))]
    return arrays, optimiser.init(arrays)


def by_fit(
    width: int, depth: int, steps_per_call: int, size: int | None = None, is_checked: bool = True
) -> Call:
    """A run of `train.fit`. If `size` is given, `train.prefetch` prepares this many batches."""
    optimiser = networks.optimiser()
    model = networks.mlp(eqxlike, width, depth)
    state = train.TrainState.create(model, optimiser, key=jax.random.key(0))
    step = train.make_step(
        lambda model, batch, key: networks.mean_squared_error(model, *batch),
        optimiser,
        check_finite=is_checked,
    )

    def call() -> np.floating:
        source = batches(width) if size is None else train.prefetch(batches(width), size)
        steps = num_steps(width)
        result = train.fit(state, step, source, num_steps=steps, steps_per_call=steps_per_call)
        return np.mean(result.history)

    return call


def by_equinox(width: int, depth: int) -> Call:
    """The loop of Equinox's examples."""
    eqx = importlib.import_module("equinox")
    optimiser = networks.optimiser()
    start = networks.mlp(eqx, width, depth)

    @eqx.filter_jit(donate="all-except-first")
    def step(data: Any, model: Any, state: Any) -> tuple:
        value, gradients = eqx.filter_value_and_grad(networks.mean_squared_error)(model, *data)
        updates, state = optimiser.update(gradients, state)
        return eqx.apply_updates(model, updates), state, value

    def call() -> np.floating:
        arrays, static = eqx.partition(start, eqx.is_array)
        model = eqx.combine(jax.tree_util.tree_map(jnp.copy, arrays), static)
        state = optimiser.init(eqx.filter(model, eqx.is_array))
        losses = []
        for data in batches(width):
            model, state, value = step(data, model, state)
            losses.append(value)
        return np.mean(jax.device_get(losses))

    return call


def by_nnx(width: int, depth: int) -> Call:
    """The loop of NNX's examples."""
    nnx = importlib.import_module("flax.nnx")
    models = importlib.import_module("benchmarks.nnx_networks")

    @nnx.jit
    def step(model: Any, optimiser: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        value, gradients = nnx.value_and_grad(models.mean_squared_error)(model, x, y)
        optimiser.update(model, gradients)
        return value

    def call() -> np.floating:
        model = models.mlp(width, depth)
        optimiser = nnx.Optimizer(model, networks.optimiser(), wrt=nnx.Param)
        losses = [step(model, optimiser, x, y) for x, y in batches(width)]
        return np.mean(jax.device_get(losses))

    return call


def by_keras(width: int, depth: int) -> Call:
    """`fit` of Keras."""
    os.environ.setdefault("KERAS_BACKEND", "jax")
    keras = importlib.import_module("keras")
    if keras.backend.backend() != "jax":
        raise ImportError(f"Keras runs on {keras.backend.backend()} here: set KERAS_BACKEND=jax")
    x, y = (np.concatenate(each) for each in zip(*batches(width), strict=True))
    names = ["relu"] * depth + [None]
    start = [each.T for each in networks.weights([width] * (depth + 2))]

    def call() -> np.floating:
        model.set_weights(start)
        # Resets the moments of the last run. The learning rate is also a variable.
        for variable in model.optimizer.variables:
            if not variable.path.endswith("/learning_rate"):
                variable.assign(np.zeros(variable.shape, variable.dtype))
        history = model.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0)
        return np.asarray(history.history["loss"])[-1]

    model = keras.Sequential([keras.layers.Dense(width, activation=name) for name in names])
    model.build((BATCH, width))
    model.compile(
        keras.optimizers.Adam(networks.LEARNING_RATE, epsilon=1e-8),
        loss="mean_squared_error",
        steps_per_execution=16,
    )
    return call


def row(width: int, depth: int, has_peers: bool = False) -> Case:
    """The row of an MLP with `depth` hidden layers. All layers have `width` features.

    Large MLPs have no peers, whose runs would take half an hour.
    """
    builders: Mapping[str, Callable[[], Call]] = {
        BY_HAND: lambda: by_hand(width, depth),
        SCAN: lambda: by_hand(width, depth, 16),
        FIT: lambda: by_fit(width, depth, 1),
        UNCHECKED: lambda: by_fit(width, depth, 1, is_checked=False),
        MANY: lambda: by_fit(width, depth, 16),
        MANY_UNCHECKED: lambda: by_fit(width, depth, 16, is_checked=False),
    }
    if has_peers:
        builders |= {
            AHEAD: lambda: by_fit(width, depth, 16, size=32),
            EQUINOX: lambda: by_equinox(width, depth),
            NNX: lambda: by_nnx(width, depth),
            KERAS: lambda: by_keras(width, depth),
        }
    return Case(f"{depth}x{width}", builders, baseline=BY_HAND)


def by_prefetch(step_us: int, source_ms: int, is_fit: bool, has_prefetch: bool) -> Call:
    """A run over small batches, in `fit` or in a loop that reads each loss."""
    count = 64 if step_us <= 300 and not source_ms else 16
    optimiser = optax.sgd(0.1)
    frozen = jnp.asarray(np.eye(8, dtype=np.float32))
    state = train.TrainState.create(frozen, optimiser, key=jax.random.key(0))

    def source() -> Iterator[tuple[np.ndarray, np.ndarray]]:
        for batch in batches(8)[:count]:
            time.sleep(1e-3 * source_ms)
            yield batch

    def loss(model: jax.Array, batch: Any, key: jax.Array) -> jax.Array:
        x, y = batch
        # An iteration takes about 1 us.
        last = jax.lax.fori_loop(0, step_us, lambda _, x: jnp.tanh(x @ frozen), x)
        return jnp.mean((last @ model - y) ** 2)

    step = train.make_step(loss, optimiser)

    def call() -> np.floating:
        made = source() if source_ms else batches(8)[:count]
        some = train.prefetch(made) if has_prefetch else made
        if is_fit:
            return np.mean(train.fit(state, step, some, num_steps=count).history)
        own, losses = jax.tree_util.tree_map(jnp.copy, state), []
        for batch in some:
            own, value = step(own, batch)
            losses.append(float(value))
        return np.mean(losses)

    return call


def prefetch_row(step_us: int, source_ms: int, is_fit: bool) -> Case:
    """The row for these approximate times of a step and of a batch."""
    name = f"{'fit' if is_fit else 'loop'}, {step_us} us, "
    return Case(
        name + (f"a batch takes {source_ms} ms" if source_ms else "batches are ready"),
        {
            NO_PREFETCH: lambda: by_prefetch(step_us, source_ms, is_fit, False),
            PREFETCH: lambda: by_prefetch(step_us, source_ms, is_fit, True),
        },
        baseline=NO_PREFETCH,
    )


ROWS: tuple[Case, ...] = (
    *(row(8, 2, has_peers=True), row(24, 3, has_peers=True), row(32, 10, has_peers=True)),
    *(row(8, 48), row(256, 6), row(1024, 4)),
    *(
        prefetch_row(step_us, source_ms, is_fit)
        for is_fit in (False, True)
        for source_ms in (0, 2)
        for step_us in (30, 300, 3000)
    ),
)


def found(result: Mapping[str, Any]) -> Iterator[report.Target]:
    """The targets for the rows of a report."""
    ratios = {
        column: {
            each["name"]: report.measurement(each).columns[column].completion_ratio.median
            for each in result["rows"]
            if column in each["columns"]
        }
        for column in (FIT, MANY, PREFETCH)
    }
    yield from report.at_most(f"{FIT} / {BY_HAND}", 1.15, ratios[FIT])
    for name, ratio in ratios[MANY].items():
        yield from report.at_most(f"{MANY} / {BY_HAND}", LIMITS[name], {name: ratio})
    yield from report.at_most(f"{PREFETCH} / {NO_PREFETCH}", 1.05, ratios[PREFETCH])


def main(arguments: Sequence[str] | None = None, rows: Sequence[Case] = ROWS) -> int:
    """Measures and prints. Returns 2 for a wrong argument and 130 after Ctrl-C."""
    return command.measure_cases(arguments, NAME, __doc__, ROUNDS, rows, found)


if __name__ == "__main__":
    sys.exit(main())
