"""Plans a training: the memory of each device, computed without allocating arrays.

The first table is computed from shapes alone, for a mesh of devices that need not exist: a
`train.Sharding` says how each array is split, and `shard_shape` gives the shape of the part on one
device. The second part compiles a step for the available devices, also from shapes. It asks
`graph.report` what the program needs and what the devices exchange.

    XLA_FLAGS=--xla_force_host_platform_device_count=4 python examples/plan_training.py --devices 64
"""

import argparse
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

import eqxlike as eqx
from eqxlike import graph, nn, train


def loss(model: Any, batch: Any, key: jax.Array) -> jax.Array:
    return jnp.mean((jax.vmap(model)(batch) - batch) ** 2)


def state_of_shapes(width: int, depth: int, optimiser: Any) -> train.TrainState:
    """The state of a stack of MLPs, a `jax.ShapeDtypeStruct` for each array."""

    def layer(key: jax.Array) -> nn.MLP:
        return nn.MLP(width, width, 4 * width, 1, key=key)

    def start(key: jax.Array) -> train.TrainState:
        model = nn.ScanStack(layer, depth, key=key)
        return train.TrainState.create(model, optimiser, key=key)

    return eqx.filter_eval_shape(start, jax.random.key(0))


def bytes_of(tree: Any, shardings: Any) -> tuple[int, int]:
    """The bytes of a whole tree, and of the part on one device."""
    in_all = a_device = 0
    shardings = jax.tree.leaves(shardings)
    arrays = [leaf for leaf in jax.tree.leaves(tree) if hasattr(leaf, "dtype")]
    for array, sharding in zip(arrays, shardings, strict=True):
        in_all += math.prod(array.shape) * array.dtype.itemsize
        a_device += math.prod(sharding.shard_shape(array.shape)) * array.dtype.itemsize
    return in_all, a_device


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--devices", type=int, default=64, metavar="N", help="devices to plan for (64)"
    )
    parser.add_argument("--width", type=int, default=512, metavar="N", help="(512)")
    parser.add_argument("--depth", type=int, default=16, metavar="N", help="layers (16)")
    options = parser.parse_args(arguments)
    optimiser = optax.adam(1e-3)
    state = state_of_shapes(options.width, options.depth, optimiser)

    sharding = train.fsdp(jax.sharding.AbstractMesh((options.devices,), ("data",)))
    where = sharding.of_state(state)
    print(f"FSDP over {options.devices} devices: bytes in all, and on each device")
    for name in ("model", "optimiser_state"):
        in_all, a_device = bytes_of(getattr(state, name), getattr(where, name))
        print(f"  {name:16} {in_all:15,} {a_device:15,}")

    sharding = train.fsdp()
    step = train.make_step(loss, optimiser, sharding=sharding)
    batch = jax.ShapeDtypeStruct((8 * jax.device_count(), options.width), jnp.float32)
    report = graph.report(step, state, batch)
    assert report.memory is not None, "the backend does not say what memory a program takes"
    print(f"\nA step compiled for {jax.device_count()} devices: bytes on each device")
    print(f"  arguments        {report.memory.arguments:15,}")
    print(f"  within the step  {report.memory.temporaries:15,}")
    for each in report.collectives:
        print(f"  {each.kind:16} {each.num_bytes:15,}  of shapes {each.shapes}")


if __name__ == "__main__":
    main()
