"""Training over all devices of one host, or of several.

A network learns the function of another network with random weights. `train.fsdp` splits its
parameters and Adam's state over all devices, and the examples of each batch too. Each process runs
the whole script, and the first process prints.

On one host, with all its devices:

    python examples/multi_host.py

On two hosts, with the address of the first host, and a free port that the second host can reach:

    host0$ python examples/multi_host.py --coordinator 10.0.0.1:9876 --processes 2 --process 0
    host1$ python examples/multi_host.py --coordinator 10.0.0.1:9876 --processes 2 --process 1

Under SLURM, start one task on each host. JAX asks SLURM for the other processes. The same works
under Open MPI and on Cloud TPUs:

    srun --nodes 2 --ntasks-per-node 1 --gpus-per-node 8 python examples/multi_host.py --cluster

To simulate two hosts on one, with two CPU devices each, use two terminals:

    export JAX_PLATFORMS=cpu XLA_FLAGS=--xla_force_host_platform_device_count=2
    python examples/multi_host.py --coordinator 127.0.0.1:9876 --processes 2 --process 0
    python examples/multi_host.py --coordinator 127.0.0.1:9876 --processes 2 --process 1

If a process dies, the other processes stop. The first process waits `--heartbeat-timeout` seconds
for a heartbeat, and then stops all processes with an error that names the dead process. The first
process accepts connections from anybody who can reach its port. Use the script only inside a
network that you trust. `--coordinator 127.0.0.1:...` listens on the loopback interface only.
"""

import argparse
import sys
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import eqxlike as eqx
from eqxlike import nn, train
from eqxlike._check_numbers import whole_number_in

FEATURES = 64


def join(options: argparse.Namespace) -> None:
    """Joins the other processes of the training, if there are several."""
    timeouts: dict[str, Any] = {
        "heartbeat_timeout_seconds": options.heartbeat_timeout,
        "shutdown_timeout_seconds": options.heartbeat_timeout,
    }
    if options.cluster:
        jax.distributed.initialize(**timeouts)
    elif options.coordinator:
        is_local = options.coordinator.startswith("127.0.0.1:")
        jax.distributed.initialize(
            options.coordinator,
            num_processes=options.processes,
            process_id=options.process,
            coordinator_bind_address=options.coordinator if is_local else None,
            **timeouts,
        )


def network(key: jax.Array, width: int) -> nn.MLP:
    return nn.MLP(FEATURES, 1, width, 2, activation=jnp.tanh, key=key)


def examples(count: int) -> tuple[np.ndarray, np.ndarray]:
    """Inputs and outputs. Each process makes all examples, and copies its own part of a batch."""
    x = np.random.default_rng(0).normal(size=(count, FEATURES)).astype(np.float32)
    with jax.default_device(jax.local_devices()[0]):
        teacher = network(jax.random.key(0), 32)
        return x, np.asarray(eqx.filter_jit(eqx.filter_vmap(teacher))(jnp.asarray(x)))


def loss(model: Any, batch: Any, key: jax.Array) -> jax.Array:
    x, y = batch
    return jnp.mean((jax.vmap(model)(x) - y) ** 2)


def run(options: argparse.Namespace) -> None:
    """Trains; the first process prints."""
    say = print if jax.process_index() == 0 else lambda *_: None
    say(f"{jax.process_count()} processes, {jax.device_count()} devices")
    sharding = train.fsdp(min_size=1024)
    optimiser = optax.adam(1e-3)

    # Create the state in a compiled function, so that no device ever holds the whole state.
    def start(key: jax.Array) -> train.TrainState:
        model_key, key = jax.random.split(key)
        state = train.TrainState.create(network(model_key, options.width), optimiser, key=key)
        return train.shard(state, sharding)

    state = eqx.filter_jit(start)(jax.random.key(1))
    step = train.make_step(loss, optimiser, sharding=sharding)
    batches: Any = train.minibatches(examples(4096), options.batch_size, seed=0)
    with train.prefetch(batches, sharding=sharding) as ahead:
        result = train.fit(
            state,
            step,
            ahead,
            num_steps=options.steps,
            on_log=lambda step, loss: say(f"step {step}: loss {loss:.4f}"),
            log_every=max(1, options.steps // 5),
        )
    weight = result.state.model.layers[1].weight
    part = weight.addressable_shards[0].data.shape
    say(f"{result.message} A device holds {part} of a weight of shape {weight.shape}.")


def main(arguments: Sequence[str] | None = None) -> int:
    """Trains; returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--coordinator", metavar="HOST:PORT", help="address of process 0")
    parser.add_argument(
        "--processes", type=whole_number_in, metavar="N", help="number of processes"
    )
    parser.add_argument(
        "--process",
        type=lambda text: whole_number_in(text, 0),
        metavar="N",
        help="number of this process, from 0",
    )
    parser.add_argument(
        "--cluster", action="store_true", help="get these three values from SLURM, MPI or the cloud"
    )
    parser.add_argument(
        "--heartbeat-timeout", type=whole_number_in, default=60, metavar="S", help="default 60"
    )
    parser.add_argument(
        "--steps", type=whole_number_in, default=500, metavar="N", help="default 500"
    )
    parser.add_argument(
        "--width", type=whole_number_in, default=1024, metavar="N", help="default 1024"
    )
    parser.add_argument(
        "--batch-size", type=whole_number_in, default=256, metavar="N", help="default 256"
    )
    options = parser.parse_args(arguments)
    if options.coordinator and (options.processes is None or options.process is None):
        parser.error("--coordinator needs --processes and --process")
    join(options)
    run(options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
