"""The first call of an exported network, compared with tracing it again, in fresh processes.

The clock starts after the imports, when the images are on the device. It stops when the first
result is ready. In between, weights or the exported program are read, traced, lowered, compiled and
run. `jax.export alone` is the floor: the same program, read and called without eqxlike. In rows
with "compiled before", XLA's program is cached in a folder. Each round checks that all columns
compute the same numbers. Ctrl-C prints the finished rows.
"""

import dataclasses
import functools
import json
import pathlib
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np

import eqxlike as eqx
from benchmarks import command, report, timing
from benchmarks.cases import find
from benchmarks.timing import Measurement

NAME = "benchmarks.export"
ROUNDS = command.Rounds(default=15, quick=2)
TITLE = "First call in a fresh process"
TOLERANCE = 1e-5

TIMED = """
import pathlib
from benchmarks import export
export.print_timed({!r}, {}, pathlib.Path({!r}))
"""


@dataclasses.dataclass(frozen=True)
class Row:
    """A network.

    - `depth`: the number of its hidden layers.
    - `is_kept`: whether compiled programs are cached in a folder.
    """

    depth: int
    is_kept: bool

    @property
    def name(self) -> str:
        """The name that selects the row."""
        kept = "compiled before" if self.is_kept else "compiled anew"
        return f"MLP of digits, {self.depth} hidden layers, {kept}"


ROWS = tuple(Row(depth, is_kept) for depth in (2, 64) for is_kept in (False, True))


def measure(row: Row, rounds: int) -> Measurement:
    """The measurement of a row. An untimed first round writes bytecode and programs.

    **Raises:** `AssertionError` if two columns compute different numbers.
    """
    with tempfile.TemporaryDirectory() as folder:
        prepare(pathlib.Path(folder), row.depth)
        turns = {
            column: functools.partial(
                timing.in_process,
                *("-c", TIMED.format(column, row.depth, folder)),
                JAX_ENABLE_COMPILATION_CACHE=str(row.is_kept).lower(),
                JAX_COMPILATION_CACHE_DIR=f"{folder}/compiled",
                JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS="0",
                JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES="-1",
            )
            for column in COLUMNS
        }
        timing.interleaved(turns, rounds=1)
        found = timing.interleaved(turns, rounds)
    sums = {column: [each["sum"] for each in results] for column, results in found.items()}
    for column, own in sums.items():
        np.testing.assert_allclose(own, sums[TRACED], rtol=TOLERANCE, err_msg=column)
    times = {column: [each["first_s"] for each in results] for column, results in found.items()}
    return timing.of_seconds(times, TRACED)


def main(arguments: Sequence[str] | None = None, rows: Sequence[Row] = ROWS) -> int:
    """Measures and prints. Returns 2 for a wrong argument and 130 after Ctrl-C."""
    options = command.parse(arguments, NAME, __doc__, ROUNDS)

    def measured(row: Row) -> dict[str, Any]:
        return report.row(row.name, measure(row, options.rounds), table=TITLE)

    return command.execute(
        NAME, options, lambda: find(options.rows, rows), measured, tables=[report.Table(TITLE)]
    )


# --- the network, its files, and its first call in a fresh process ---

TRACED, EXPORTED, JAX_EXPORT = "traced anew", "eqxlike.export", "jax.export alone"
IMAGES, WEIGHTS, EXPORTED_FILE, JAX_FILE = "images.npy", "weights.eqx", "network", "network.jax"


def make_network(depth: int) -> eqx.nn.MLP:
    """A network that classifies digits of 64 pixels."""
    return eqx.nn.MLP(64, 10, width_size=64, depth=depth, key=jax.random.key(0))


def predict(network: eqx.nn.MLP, images: Any) -> jax.Array:
    """The probabilities of the digits, for a batch."""
    return jax.nn.softmax(jax.vmap(network)(images))


def _traced(folder: pathlib.Path, depth: int) -> Callable[[Any], Any]:
    like = eqx.filter_eval_shape(make_network, depth)
    network = eqx.tree_deserialise_leaves(folder / WEIGHTS, like)
    function = eqx.filter_jit(predict)
    return lambda images: function(network, images)


def _exported(folder: pathlib.Path, depth: int) -> Callable[[Any], Any]:
    return eqx.load_exported(folder / EXPORTED_FILE).call


def _by_jax(folder: pathlib.Path, depth: int) -> Callable[[Any], Any]:
    content = bytearray((folder / JAX_FILE).read_bytes())
    return jax.jit(jax.export.deserialize(content).call)


COLUMNS: dict[str, Callable[[pathlib.Path, int], Callable[[Any], Any]]] = {
    TRACED: _traced,
    EXPORTED: _exported,
    JAX_EXPORT: _by_jax,
}


def prepare(folder: pathlib.Path, depth: int) -> None:
    """Writes the files that the processes read."""
    network = make_network(depth)
    images = np.random.default_rng(0).uniform(0, 1, (32, 64)).astype(np.float32)
    np.save(folder / IMAGES, images)
    eqx.tree_serialise_leaves(folder / WEIGHTS, network)

    def predict_batch(images: Any) -> jax.Array:
        return predict(network, images)

    eqx.export(predict_batch, jax.ShapeDtypeStruct(("batch", 64), jnp.float32)).save(
        folder / EXPORTED_FILE
    )
    (batch,) = jax.export.symbolic_shape("batch")
    struct = jax.ShapeDtypeStruct((batch, 64), jnp.float32)
    alone = jax.export.export(jax.jit(predict_batch), platforms=("cpu", "cuda"))(struct)
    (folder / JAX_FILE).write_bytes(alone.serialize())


def print_timed(column: str, depth: int, folder: pathlib.Path) -> None:
    """Prints the seconds of the first call, with reading its files, and the sum of its numbers."""
    images = jax.device_put(np.load(folder / IMAGES))
    jax.block_until_ready(images)
    start_s = time.perf_counter()
    found = jax.block_until_ready(COLUMNS[column](folder, depth)(images))
    first_s = time.perf_counter() - start_s
    print(json.dumps({"first_s": first_s, "sum": float(np.sum(np.asarray(found) ** 2))}))


if __name__ == "__main__":
    sys.exit(main())
