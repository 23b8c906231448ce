"""One process of a training over four devices: it prints what it found as JSON.

`python -m tests.train.sharding.on_devices JSON`, with the number of steps, the trainings to run,
each a sharding and a dtype, and for one of two processes the port of the first, its own number, how
long it waits for a sign of life of the other, and the step at which it dies.
"""

import json
import os
import signal
import sys
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec as P

from eqxlike import is_array, train
from tests.train.sharding import trainings

SHARDINGS = {
    "one": lambda: None,
    "data_parallel": train.data_parallel,
    "fsdp": lambda: train.fsdp(min_size=16),
    "two axes": lambda: train.Sharding(
        jax.make_mesh((2, 2), ("data", "model")),
        {"first.*": P("model", "data"), "last.weight": P(None, "model")},
    ),
}


def join(port: int, process: int, heartbeat_s: int) -> None:
    """Makes this one of two processes, which wait for each other on the loopback interface."""
    jax.distributed.initialize(
        f"127.0.0.1:{port}",
        num_processes=2,
        process_id=process,
        coordinator_bind_address=f"127.0.0.1:{port}",
        initialization_timeout=60,
        heartbeat_timeout_seconds=heartbeat_s,
        shutdown_timeout_seconds=heartbeat_s,
    )


def found(sharding: Any, count: int) -> dict[str, Any]:
    trained = trainings.run(sharding, count)
    state = trained.state
    arrays = [
        leaf for leaf in jax.tree.leaves((state.model, state.optimiser_state)) if is_array(leaf)
    ]
    bytes_by_device: dict[int, int] = {}
    for array in arrays:
        for shard in array.addressable_shards:
            number = shard.device.id
            bytes_by_device[number] = bytes_by_device.get(number, 0) + shard.data.nbytes
    return {
        "losses": trained.losses,
        "num_traces": trained.num_traces,
        "num_compiled_later": trained.num_compiled_later,
        "share": {
            number: size / sum(array.nbytes for array in arrays)
            for number, size in bytes_by_device.items()
        },
        "weight": _here(state.model.first.weight),
        "collectives": sorted({each.kind for each in _collectives(trained)}),
    }


def _collectives(trained: trainings.Trained) -> tuple[train.Collective, ...]:
    lowered = trained.step.lower(trained.state, trainings.batches(1)[0])
    return train.collectives(lowered.compile())


def _here(array: jax.Array) -> list[Any]:
    """The parts of an array on the devices of this process, each with where it begins."""
    return [
        [[index.start or 0 for index in shard.index], np.asarray(shard.data).tolist()]
        for shard in array.addressable_shards
    ]


def die_at(step: int) -> None:
    """Has the process kill itself after so many steps."""
    made = iter(range(step))
    batches = trainings.batches

    def dying(count: int) -> Any:
        for batch in batches(count):
            if next(made, None) is None:
                os.kill(os.getpid(), signal.SIGKILL)
            yield batch

    trainings.batches = dying


def main(options: dict[str, Any]) -> None:
    if "process" in options:
        join(options["port"], options["process"], options["heartbeat_s"])
    if "dies_at" in options:
        die_at(options["dies_at"])
    results = {}
    for name, dtype in options["runs"]:
        with jax.enable_x64(dtype == "float64"):
            results[f"{name}, {dtype}"] = found(SHARDINGS[name](), options["steps"])
    print(json.dumps(results))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
