"""The time and memory of a training step on several devices.

An MLP is trained with Adam on the same batches, replicated (`train.data_parallel`) or sharded
(`train.fsdp`). A check before timing ensures that all columns compute the same losses.
`benchmarks.timing` describes the method. Ctrl-C prints the finished rows.

Other rows train a stack of MLPs whose hidden layers are four times as wide. FSDP all-gathers the
layers one at a time, in the loop over layers. Another row shards the axis of layers, so that all
layers are all-gathered at once.

Devices of a CPU share its cores, and their calls wait for each other. If one device already uses
all cores, the ratio cannot be below 1, and shows the cost of communication. Memory is the memory of
one device. Columns with more devices than the machine has are left out.
"""

import dataclasses
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import PartitionSpec

import eqxlike
from benchmarks import command, networks, report, table
from benchmarks.cases import check_agreement, find
from benchmarks.timing import Call, measure
from eqxlike import nn, train
from eqxlike._programs import collectives
from eqxlike._tables import grouped

NAME = "benchmarks.scaling"
ROUNDS = command.Rounds(default=30, quick=5)

COUNTS = (1, 2, 4)
BATCH = 256
SHARDINGS = {
    "data parallel": train.data_parallel,
    "FSDP": lambda devices: train.fsdp(devices, min_size=1),
}
STACKED_BATCH = 8
SHARDINGS_OF_STACKS = {
    **SHARDINGS,
    "layers at once": lambda devices: train.Sharding(
        train.fsdp(devices).mesh, PartitionSpec("data")
    ),
}


@dataclasses.dataclass(frozen=True)
class Training:
    """Training on some devices.

    - `call`: makes the next step and returns its loss.
    - `memory`: bytes on one device: the state between steps, the additional memory of a step, and
      the data received from other devices.
    """

    call: Call
    memory: Mapping[str, int]


@dataclasses.dataclass(frozen=True)
class Row:
    """An MLP or a stack of MLPs, trained with the same sharding on different numbers of devices."""

    sharding: str
    depth: int
    width: int
    batch: int = BATCH
    is_stacked: bool = False

    @property
    def name(self) -> str:
        """The name."""
        depth = f"{self.depth} stacked layers" if self.is_stacked else f"depth {self.depth}"
        return f"{self.sharding}, {depth}, width {self.width}, batch {self.batch}"

    def model(self) -> Any:
        """The network."""
        if not self.is_stacked:
            return networks.mlp(eqxlike, self.width, self.depth)

        def layer(key: jax.Array) -> nn.MLP:
            return nn.MLP(self.width, self.width, 4 * self.width, 1, key=key)

        return nn.ScanStack(layer, self.depth, key=jax.random.key(0))

    def training(self, count: int) -> Training:
        """The training on the first `count` devices."""
        sharding = SHARDINGS_OF_STACKS[self.sharding](jax.devices()[:count])
        optimiser = networks.optimiser()
        state = train.TrainState.create(self.model(), optimiser, key=jax.random.key(0))
        state = train.shard(state, sharding)
        step = train.make_step(loss, optimiser, sharding=sharding)
        data = (
            jax.device_put(networks.normal(self.batch, self.width, seed=1), sharding.batch),
            jax.device_put(networks.normal(self.batch, self.width, seed=2), sharding.batch),
        )
        compiled = step.lower(state, data).compile()
        memory = {
            "at rest": sum(array.addressable_shards[0].data.nbytes for array in arrays(state)),
            "within a step": compiled.memory_analysis().temp_size_in_bytes,
            "exchanged": sum(each.num_bytes for each in collectives(compiled)),
        }

        def call() -> jax.Array:
            nonlocal state
            state, value = step(state, data)
            return value

        return Training(call, memory)

    def measured(self, rounds: int) -> dict[str, Any]:
        """The row in the form of a report."""
        trainings = {column(count): self.training(count) for count in counts()}
        calls = {name: training.call for name, training in trainings.items()}
        check_agreement(calls)
        found = measure(calls, baseline=column(1), rounds=rounds)
        memory = {name: dict(training.memory) for name, training in trainings.items()}
        return report.row(self.name, found, notes()) | {"memory": memory}


ROWS = (
    *(Row(sharding, 2, width) for width in (256, 1024) for sharding in SHARDINGS),
    *(Row(sharding, 16, 64, STACKED_BATCH, is_stacked=True) for sharding in SHARDINGS_OF_STACKS),
)


def loss(model: Any, batch: tuple[jax.Array, jax.Array], key: Any) -> jax.Array:
    """The mean squared error, with the signature that `make_step` expects."""
    return networks.mean_squared_error(model, *batch)


def arrays(state: Any) -> Iterator[jax.Array]:
    """All arrays of a state except its key, whose bytes cannot be counted."""
    leaves = jax.tree.leaves((state.model, state.optimiser_state))
    return (leaf for leaf in leaves if eqxlike.is_array(leaf))


def counts() -> list[int]:
    """The available numbers of devices."""
    return [count for count in COUNTS if count <= jax.device_count()]


def column(count: int) -> str:
    """The name of the column for a number of devices."""
    return "1 device" if count == 1 else f"{count} devices"


def notes() -> list[str]:
    """A note on columns that are left out."""
    missing = [column(count) for count in COUNTS if count not in counts()]
    return [f"left out, as there are no more devices: {', '.join(missing)}"] if missing else []


def memory_cells(rows: Sequence[Mapping[str, Any]]) -> table.Rows:
    """The cells of the table of memory, starting with the headings."""
    kinds = {
        "at rest": "at rest",
        "within a step": "within a step",
        "exchanged": "exchanged, in a loop: a turn",
    }
    cells = [["", *kinds.values(), "at rest, of one device's"]]
    for row in rows:
        alone = row["memory"][column(1)]["at rest"]
        for name, memory in row["memory"].items():
            part = f"{memory['at rest'] / alone:.3f}"
            cells.append(
                [f"{row['name']}, {name}", *(grouped(memory[kind]) for kind in kinds), part]
            )
    return cells


def targets(rows: Sequence[Mapping[str, Any]]) -> list[report.Target]:
    """The targets of the rows of a report."""
    found = {}
    for row in rows:
        memory = row["memory"]
        for count in COUNTS[1:]:
            if row["name"].startswith("FSDP") and column(count) in memory:
                share = memory[column(count)]["at rest"] / memory[column(1)]["at rest"]
                found[f"{row['name']}, {column(count)}"] = count * share
    return list(report.at_most("FSDP, bytes at rest on a device x devices / in all", 1.05, found))


def shown(result: Mapping[str, Any], *, markdown: bool) -> str:
    """The tables of a report as text."""
    draw: Callable[[table.Rows], str] = table.markdown_table if markdown else table.text_table
    parts = []
    if result["rows"]:
        cells = draw(memory_cells(result["rows"]))
        parts = [f"Memory, bytes on one device\n\n{cells}"]
        if found := targets(result["rows"]):
            parts.append(report.render_targets(found))
    return "\n\n".join([*parts, table.render(result, markdown=markdown)])


def main(arguments: Sequence[str] | None = None, rows: Sequence[Row] = ROWS) -> int:
    """Measures and prints. Returns 2 for a wrong argument and 130 after Ctrl-C."""
    options = command.parse(arguments, NAME, __doc__, ROUNDS)

    def measured(row: Row) -> dict[str, Any]:
        return row.measured(options.rounds)

    return command.execute(NAME, options, lambda: find(options.rows, rows), measured, render=shown)


if __name__ == "__main__":
    if "device_count" not in os.environ.get("XLA_FLAGS", ""):
        jax.config.update("jax_num_cpu_devices", max(COUNTS))
    sys.exit(main())
