"""The first call of an exported network, compared with tracing it again, in fresh processes.

The clock starts after the imports, when the images are on the device. It stops when the first
result is ready. In between, weights or the exported program are read, traced, lowered, compiled and
run. `jax.export alone` is the floor: the same program, read and called without eqxlike. In rows
with "compiled before", XLA's program is cached in a folder. Each round checks that all columns
compute the same numbers. Ctrl-C prints the finished rows.
"""

import dataclasses
import json
import os
import pathlib
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np

import eqxlike as eqx
from benchmarks import cases, command, export_process, report
from benchmarks.export_process import COLUMNS, TRACED
from benchmarks.timing import Measurement, Samples, round_orders, summarise

NAME = "benchmarks.export"
ROUNDS = command.Rounds(default=15, quick=2)
TITLE = "First call in a fresh process"
TOLERANCE = 1e-5


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


def prepare(folder: pathlib.Path, depth: int) -> None:
    """Writes the files that the processes read."""
    network = export_process.make_network(depth)
    images = np.random.default_rng(0).uniform(0, 1, (32, 64)).astype(np.float32)
    np.save(folder / export_process.IMAGES, images)
    eqx.tree_serialise_leaves(folder / export_process.WEIGHTS, network)

    def predict(images: Any) -> jax.Array:
        return export_process.predict(network, images)

    eqx.export(predict, jax.ShapeDtypeStruct(("batch", 64), jnp.float32)).save(
        folder / export_process.EXPORTED_FILE
    )
    (batch,) = jax.export.symbolic_shape("batch")
    struct = jax.ShapeDtypeStruct((batch, 64), jnp.float32)
    alone = jax.export.export(jax.jit(predict), platforms=("cpu", "cuda"))(struct)
    (folder / export_process.JAX_FILE).write_bytes(alone.serialize())


def in_process(column: str, row: Row, folder: pathlib.Path) -> dict[str, float]:
    """The result of `export_process.timed` in a fresh process."""
    cache = {
        "JAX_ENABLE_COMPILATION_CACHE": str(row.is_kept).lower(),
        "JAX_COMPILATION_CACHE_DIR": str(folder / "compiled"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
    process = subprocess.run(
        [sys.executable, "-m", export_process.__name__, column, str(row.depth), str(folder)],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        env=os.environ | cache,
    )
    return json.loads(process.stdout.splitlines()[-1])


def measure(row: Row, rounds: int) -> Measurement:
    """The measurement of a row. An untimed first round writes bytecode and programs.

    **Raises:** `AssertionError` if two columns compute different numbers.
    """
    times: dict[str, list[float]] = {column: [] for column in COLUMNS}
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        prepare(folder, row.depth)
        for column in COLUMNS:
            in_process(column, row, folder)
        for order in round_orders(tuple(COLUMNS), rounds, seed=0):
            found = {column: in_process(column, row, folder) for column in order}
            for column, result in found.items():
                times[column].append(1e6 * result["first_s"])
                np.testing.assert_allclose(
                    result["sum"], found[TRACED]["sum"], rtol=TOLERANCE, err_msg=column
                )
    samples = {column: Samples(tuple(us), tuple(us), calls=1) for column, us in times.items()}
    return summarise(samples, TRACED)


def main(arguments: Sequence[str] | None = None, rows: Sequence[Row] = ROWS) -> int:
    """Measures and prints. Returns 2 for a wrong argument and 130 after Ctrl-C."""
    options = command.parse(arguments, NAME, __doc__, ROUNDS)

    def begin() -> tuple[Sequence[Row], dict[str, Any]]:
        result = report.new_report({"rounds": options.rounds})
        result["tables"] = [{"title": TITLE, "clocks": ["completion"], "unit": "milliseconds"}]
        return cases.find(options.rows, rows), result

    def measured(row: Row) -> dict[str, Any]:
        found = measure(row, options.rounds)
        return report.row(row.name, found, []) | {"table": TITLE}

    return command.execute(NAME, options, begin, measured)


if __name__ == "__main__":
    sys.exit(main())
