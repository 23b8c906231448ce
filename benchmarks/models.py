"""Training steps of whole networks: eqxlike, Equinox, NNX, and JAX by hand.

"By hand" is `jax.jit` over a list of arrays, with functions of a whole batch. All columns start
from the same weights and train by Adam; that they have the same losses is checked before anything
is timed. Peak memory is what XLA's analysis of the compiled step says: arguments, outputs and
temporaries, less the outputs that take over donated arguments.

`--memory` adds by how much a fresh process grows for such steps, and `--first-steps` the first step
of fresh processes, without a compilation cache: the clock starts before JAX is imported, and stops
when the loss is there. The method is that of `eqxlike._timing`. Ctrl-C prints the rows that are
finished.
"""

import argparse
import dataclasses
import functools
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import command, model_steps, report
from benchmarks.cases import Case, build, find
from benchmarks.model_steps import BY_HAND, COLUMNS, LIBRARIES, NNX, SCAN_STACK, Network
from eqxlike._timing import Samples, measure, round_orders, summarise

NAME = "benchmarks.models"
ROUNDS = command.Rounds(default=15, quick=3)
FIRST_ROUNDS = command.Rounds(default=3, quick=1)

STEP = "Training step"
FIRST_STEP = "First step in a fresh process, from the start of imports"
BUILDING = "Building in that process: model, optimiser's state and batch"

TIMED = """
import time
start_s = time.perf_counter()
from benchmarks import model_steps
model_steps.time_first_step({!r}, model_steps.FIRST, start_s)
"""
WEIGHED = """
from benchmarks import model_steps
model_steps.print_process_bytes({!r}, model_steps.NETWORKS[{}])
"""


@dataclasses.dataclass(frozen=True)
class Row:
    """A row: its name, its table, and a function from the options to the row of a report."""

    name: str
    table: str
    measured: Callable[[argparse.Namespace], dict[str, Any]]


def step(network: Network) -> Row:
    """The row of the time and the memory of a training step."""

    def measured(options: argparse.Namespace) -> dict[str, Any]:
        steps, notes = build(case(network))
        check(steps)
        calls = {column: each.call for column, each in steps.items()}
        times = measure(calls, baseline=_baseline(calls), rounds=options.rounds)
        row = report.row(network.name, times, notes)
        row |= {
            "table": STEP,
            "peak_bytes": {name: each.peak_bytes() for name, each in steps.items()},
        }
        if options.memory:
            of = model_steps.NETWORKS.index(network)
            grown = {column: _in_process(WEIGHED.format(column, of)) for column in steps}
            row["process_bytes"] = {column: found["bytes"] for column, found in grown.items()}
        return row

    return Row(network.name, STEP, measured)


def case(network: Network) -> Any:
    """The case of a network; it builds a `Step` for each column."""
    arrays = model_steps.weights(network)

    def built(column: str) -> Any:
        # Each step donates what it starts with.
        return COLUMNS[column](network, [jnp.copy(array) for array in arrays])

    builders = {
        column: functools.partial(built, column)
        for column in COLUMNS
        if column != SCAN_STACK or network.maker == "language_model"
    }
    return Case(network.name, builders, baseline=NNX)


def check(steps: Any, times: int = 3) -> None:
    """Raises `AssertionError` unless all columns have the same losses, of several steps."""
    # GPUs multiply float32 matrices with fewer digits by default, in libraries of several kernels.
    tolerance = 1e-4 if jax.default_backend() == "cpu" else 1e-2
    losses = {column: [float(step.call()) for _ in range(times)] for column, step in steps.items()}
    for column, found in losses.items():
        expected = losses[BY_HAND]
        message = f"the losses of {column!r} differ from those {BY_HAND}"
        np.testing.assert_allclose(found, expected, rtol=tolerance, err_msg=message)


def _baseline(columns: Any) -> str:
    return NNX if NNX in columns else next(iter(columns))


# --- first steps, in fresh processes ---


def first_step(table: str, key: str) -> Row:
    """The row of a time that `time_first_step` prints."""

    def measured(options: argparse.Namespace) -> dict[str, Any]:
        times, notes = _in_processes(options.first_rounds)
        samples = {
            column: Samples(us, us, calls=1)
            for column, found in times.items()
            for us in [tuple(1e6 * each[key] for each in found)]
        }
        found = report.row(name, summarise(samples, _baseline(samples)), notes)
        return found | {"table": table}

    name = model_steps.FIRST.name
    return Row(name, table, measured)


@functools.cache
def _in_processes(rounds: int) -> tuple[dict[str, list[Any]], list[str]]:
    """What the processes of each column printed, interleaved; after a round that is not counted,
    which writes bytecode. And notes on what is not installed.
    """
    found: dict[str, list[Any]] = {}
    notes = []
    for column, library in LIBRARIES.items():
        if column == BY_HAND:
            continue
        if importlib.util.find_spec(library.partition(".")[0]) is None:
            notes.append(f"{column} is left out: No module named {library!r}")
        else:
            _in_process(TIMED.format(column))
            found[column] = []
    for order in round_orders(tuple(found), rounds, seed=0):
        for column in order:
            found[column].append(_in_process(TIMED.format(column)))
    return found, notes


def _in_process(program: str) -> dict[str, float]:
    process = subprocess.run(
        [sys.executable, "-c", program],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        env=os.environ | {"JAX_ENABLE_COMPILATION_CACHE": "false"},
    )
    return json.loads(process.stdout.splitlines()[-1])


ROWS = tuple(map(step, model_steps.NETWORKS))
FIRST_ROWS = (first_step(FIRST_STEP, "first_s"), first_step(BUILDING, "build_s"))


def main(
    arguments: Sequence[str] | None = None,
    rows: Sequence[Row] = ROWS,
    first_rows: Sequence[Row] = FIRST_ROWS,
) -> int:
    """Measures and prints; returns the exit status: 2 for a wrong argument, 130 after Ctrl-C."""
    flags = {
        "first-steps": "the first step of fresh processes too",
        "memory": "the memory of fresh processes too",
    }
    options = command.parse(arguments, NAME, __doc__, ROUNDS, FIRST_ROUNDS, flags=flags)

    def begin() -> tuple[Sequence[Row], dict[str, Any]]:
        among = [*rows, *(first_rows if options.first_steps else ())]
        method = {"rounds": options.rounds}
        if options.first_steps:
            method["first_rounds"] = options.first_rounds
        result = report.new_report(method)
        result["tables"] = [
            {"title": title, "clocks": ["completion"], "unit": "milliseconds"}
            for title in dict.fromkeys(row.table for row in among)
        ]
        return find(options.rows, among), result

    return command.execute(NAME, options, begin, lambda row: row.measured(options))


if __name__ == "__main__":
    sys.exit(main())
