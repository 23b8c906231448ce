"""Small trainings with an optional sharding: one with a full state, and one for processes."""

import contextlib
import itertools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec as P

import eqxlike as eqx
from eqxlike import nn, train
from tests.nn.arrays import filled

# With a small `eps`, Adam would amplify the rounding errors of a gradient of zero.
OPTIMISER = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-2, eps=1e-3))


class Network(nn.StatefulLayer):
    """Two layers, and between them stacked layers, batch statistics and dropout."""

    first: nn.Linear
    stack: nn.ScanStack
    norm: nn.BatchNorm
    dropout: nn.Dropout
    last: nn.Linear

    def __init__(self, key):
        first_key, last_key = jax.random.split(key)
        stack_key = jax.random.fold_in(key, 2)
        # The gradient of a bias would only be rounding errors, which Adam amplifies.
        self.first = nn.Linear(4, 16, use_bias=False, key=first_key)
        self.stack = nn.ScanStack(
            lambda key: nn.Linear(16, 16, use_bias=False, key=key), 3, key=stack_key
        )
        self.norm = nn.BatchNorm(16, "batch", mode="batch")
        self.dropout = nn.Dropout(0.2)
        self.last = nn.Linear(16, 4, key=last_key)

    def __call__(self, x, state, *, key):
        x, state = self.norm(self.stack(self.first(x)), state)
        return self.last(self.dropout(jax.nn.relu(x), key=key)), state


def squares(model, model_state, batch, key):
    x, y = batch
    keys = jax.random.split(key, len(x))
    outputs, model_state = jax.vmap(
        lambda x, key: model(x, model_state, key=key), out_axes=(0, None), axis_name="batch"
    )(x, keys)
    return jnp.mean((outputs - y) ** 2), model_state


def start(**options):
    model, model_state = filled(nn.make_with_state(Network), jax.random.key(0))
    key = jax.random.key(1)
    return train.TrainState.create(model, OPTIMISER, key=key, model_state=model_state, **options)


def batches(count):
    generator = np.random.default_rng(0)
    dtype = jax.dtypes.canonicalize_dtype(float)
    return [
        (generator.normal(size=(8, 4)).astype(dtype), generator.normal(size=(8, 4)).astype(dtype))
        for _ in range(count)
    ]


class Trained(NamedTuple):
    losses: list[float]
    state: Any
    num_traces: int
    num_compiled_later: int
    """The number of programs that were compiled after the first step."""


@contextlib.contextmanager
def compilations():
    """A list with an item for each program that is compiled in the block."""
    compiled = []

    def listen(event, duration_s, **_):
        if event == "/jax/core/compile/backend_compile_duration":
            compiled.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield compiled
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


def run(sharding, count, **options):
    traces, losses = [], []

    def loss(*arguments):
        traces.append(None)
        return squares(*arguments)

    state = start(**options)
    if sharding is not None:
        state = train.shard(state, sharding)
    step = train.make_step(loss, OPTIMISER, sharding=sharding)
    with compilations() as compiled:
        for number, batch in enumerate(batches(count)):
            state, value = step(state, batch)
            if number == 0:
                assert compiled
                compiled.clear()
            losses.append(value)
    return Trained(list(map(float, losses)), state, len(traces), len(compiled))


def run_short():
    """The losses, a device's part of a weight, and the number of compilations after two steps."""
    mesh = jax.make_mesh((jax.device_count() // 2, 2), ("data", "model"))
    sharding = train.Sharding(mesh, {"weight": P("model", "data")})
    optimiser = optax.sgd(0.1, momentum=0.9)
    state = train.TrainState.create(
        filled(nn.Linear, 8, 8, key=jax.random.key(0)), optimiser, key=jax.random.key(1)
    )
    state = train.shard(state, sharding)

    def loss(model, x, key):
        return jnp.mean((jax.vmap(model)(x) + jax.random.uniform(key, x.shape)) ** 2)

    step = train.make_step(loss, optimiser, sharding=sharding)
    x = np.random.default_rng(0).normal(size=(24, 8)).astype(np.float32)
    losses = []
    ahead = train.prefetch(train.minibatches(x, 8, seed=0), sharding=sharding)
    with ahead, compilations() as compiled:
        for number, batch in enumerate(itertools.islice(ahead, 6)):
            state, value = step(state, batch)
            losses.append(float(value))
            if number == 1:
                compiled.clear()
    part = state.model.weight.addressable_shards[0].data.shape
    return {"losses": losses, "part": part, "compiled": len(compiled)}


def shardings_of(tree):
    return [leaf.sharding for leaf in jax.tree.leaves(tree) if eqx.is_array(leaf)]
