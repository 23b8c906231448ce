"""Trains a model on one device, and on several in two ways: losses, memory, communication.

Data parallelism replicates the model on each device and splits batches. Fully sharded data
parallelism (FSDP) also splits parameters, gradients and Adam's state, and all-gathers a parameter
where it is needed. For each way, the step and the batches use one `train.Sharding`. The model and
the loss do not change.

The script prints the losses next to one device's losses, how many bytes each device holds between
steps, what the compiled step communicates, and how many held-out digits are right. With only one
device, divide the processor into several:

    XLA_FLAGS=--xla_force_host_platform_device_count=4 python examples/devices.py
"""

import argparse
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import optax
from sklearn import datasets

import eqxlike as eqx
from eqxlike import graph, nn, train

BATCH_SIZE = 120


def loss(model: Any, batch: Any, key: jax.Array) -> jax.Array:
    images, labels = batch
    logits = jax.vmap(model)(images)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def measure(model: Any, batch: Any) -> dict[str, train.metrics.Mean]:
    images, labels = batch
    return {"accuracy": train.metrics.accuracy(jax.vmap(model)(images), labels)}


def load_digits() -> tuple[Any, Any]:
    """Training images and held-out images, with labels."""
    images, labels = datasets.load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(labels))
    images, labels = (images[order] / 16).astype(np.float32), labels[order].astype(np.int32)
    return (images[500:], labels[500:]), (images[:500], labels[:500])


def size_of(tree: Any) -> int:
    return sum(leaf.nbytes for leaf in jax.tree.leaves(tree) if eqx.is_array(leaf))


def bytes_on(device: Any, tree: Any) -> int:
    """The bytes of a tree that a device holds."""
    arrays = [leaf for leaf in jax.tree.leaves(tree) if eqx.is_array(leaf)]
    shards = [shard for array in arrays for shard in array.addressable_shards]
    return sum(shard.data.nbytes for shard in shards if shard.device == device)


def exchanged(step: Any, state: Any, batch: Any) -> str:
    """For each kind of collective, the number and bytes of the arrays that a step communicates."""
    totals: dict[str, tuple[int, int]] = {}
    for each in graph.report(step, state, batch).collectives:
        count, size = totals.get(each.kind, (0, 0))
        totals[each.kind] = count + len(each.shapes), size + each.num_bytes
    parts = [f"{kind} {count} ({size:,} bytes)" for kind, (count, size) in totals.items()]
    return ", ".join(parts) or "nothing"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=200, metavar="N", help="(200)")
    parser.add_argument("--width", type=int, default=512, metavar="N", help="layer width (512)")
    options = parser.parse_args(arguments)
    devices, optimiser = jax.devices(), optax.adam(1e-3)
    learned, held_out = load_digits()
    model = nn.MLP(64, 10, options.width, depth=2, key=jax.random.key(0))
    start = train.TrainState.create(model, optimiser, key=jax.random.key(1))
    print(f"{len(devices)} devices, {devices[0].device_kind}; a state of {size_of(start):,} bytes")

    histories = {}
    for name, sharding in {
        "one device": train.data_parallel(devices[:1]),
        "data-parallel": train.data_parallel(devices),
        "FSDP": train.fsdp(devices, min_size=1024),
    }.items():
        step = train.make_step(loss, optimiser, sharding=sharding)
        evaluate = train.make_evaluate(measure, [held_out], sharding=sharding)
        state = train.shard(start, sharding)
        batches: Any = train.minibatches(learned, BATCH_SIZE, seed=0)
        with train.prefetch(batches, sharding=sharding) as ahead:
            sent = exchanged(step, state, next(ahead))
        batches = train.minibatches(learned, BATCH_SIZE, seed=0)
        with train.prefetch(batches, sharding=sharding) as ahead:
            result = train.fit(state, step, ahead, num_steps=options.steps)
        histories[name] = np.array(result.history)
        apart = np.max(np.abs(histories[name] / histories["one device"] - 1))
        weight = result.state.model.layers[1].weight
        part = weight.addressable_shards[0].data.shape
        print(f"\n{name}")
        print(f"  each device holds    {bytes_on(devices[0], result.state):,} bytes")
        print(f"  of a weight          {part} of {weight.shape}")
        print(f"  a step exchanges     {sent}")
        print(f"  losses differ by     {apart:.0e} from one device")
        print(f"  held-out digits      {evaluate(result.state)['accuracy']:.1%} right")


if __name__ == "__main__":
    main()
