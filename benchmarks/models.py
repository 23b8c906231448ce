"""Training steps of whole networks: eqxlike, Equinox, NNX, PyTorch, and JAX by hand.

GPT-2 with contexts of 1,024 and 8,192 tokens and ResNet-50 are for GPUs. They compute in bfloat16,
with float32 parameters, in at most five rounds. Small versions are for CPUs. PyTorch runs language
models and ResNets, with `torch.compile` on a GPU and eagerly on a CPU. Each table of times has a
table of tokens or examples a second, with the fraction of the device's bfloat16 peak if it is
known. A column that does not fit in the memory of the device is left out.

"By hand" is `jax.jit` of a list of arrays, with functions of a whole batch. All columns start from
the same weights and train with Adam. A check before timing compares their losses. Peak memory is
XLA's estimate for the compiled step: arguments, outputs and temporaries, without outputs that reuse
donated arguments.

`--memory` also measures the memory growth of a fresh process during such steps. `--first-steps`
also times the first step of fresh processes, without a compilation cache, from before the import of
JAX until the loss is ready. `benchmarks.timing` describes the method. Ctrl-C prints the finished
rows.
"""

import argparse
import functools
import gc
import importlib.util
import re
import sys
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import command, generation, model_steps, report
from benchmarks.cases import Case, build, find
from benchmarks.command import OwnRow as Row
from benchmarks.model_steps import (
    BY_HAND,
    COLUMNS,
    LIBRARIES,
    NNX,
    SCAN_STACK,
    TORCH_COMPILED,
    TORCH_EAGER,
    Network,
)
from benchmarks.timing import Measurement, in_process, interleaved, measure, of_seconds
from eqxlike.train._logging import _PEAKS

NAME = "benchmarks.models"
ROUNDS = command.Rounds(default=15, quick=3)
FIRST_ROUNDS = command.Rounds(default=3, quick=1)

STEP = "Training step"
FULL_STEP = "Training step at full size, in bfloat16"
FIRST_STEP = "First step in a fresh process, from the start of imports"
GENERATION = f"{generation.NEW} new tokens after prompts of {generation.PROMPT}"
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


def step(network: Network) -> Row:
    """The row of the time and memory of a training step."""
    is_full = network.backend == "gpu"
    table = FULL_STEP if is_full else STEP

    def measured(options: argparse.Namespace) -> dict[str, Any]:
        gc.collect()  # this row may need the memory of the previous row
        steps, notes = build(case(network))
        leave_out_large(network.name, steps, notes)
        check(steps, tolerance(network))
        calls = {column: each.call for column, each in steps.items()}
        # At full size other columns may not fit in memory.
        baseline = BY_HAND if is_full else _baseline(calls)
        rounds = min(options.rounds, 5) if is_full else options.rounds
        times = measure(calls, baseline=baseline, rounds=rounds)
        row = report.row(network.name, times, notes, table)
        sizes = {name: each.peak_bytes() for name, each in steps.items()}
        row["peak_bytes"] = {name: size for name, size in sizes.items() if size is not None}
        row["rates"] = rates(network, times)
        if options.memory and not is_full:
            of = model_steps.NETWORKS.index(network)
            grown = {column: _in_process(WEIGHED.format(column, of)) for column in steps}
            row["process_bytes"] = {column: found["bytes"] for column, found in grown.items()}
        return row

    return Row(network.name, table, measured, network.backend)


def rates(network: Network, times: Measurement) -> dict[str, Any]:
    """Tokens or examples a second of each column, and the fraction of the peak if it is known."""
    kind = jax.devices()[0].device_kind
    peaks = [peak for name, peak in _PEAKS.items() if name in kind]
    flops = network.flops if network.dtype == "bfloat16" else None
    most = peaks[0] * network.amount / flops if peaks and flops is not None else None
    return per_second(network.amount, times) | {"peak_per_second": most}


def per_second(amount: int, times: Measurement) -> dict[str, Any]:
    """The tokens or examples a second of each column, without the peak of the device."""
    columns = times.columns.items()
    speeds = {name: 1e6 * amount / column.completion_us for name, column in columns}
    return {"per_second": speeds, "peak_per_second": None}


def leave_out_large(name: str, steps: dict[str, Any], notes: list[str]) -> None:
    """Makes the first step of each column, and drops columns that run out of memory."""
    for column, each in list(steps.items()):
        try:
            jax.block_until_ready(each.call())
        except RuntimeError as error:
            if not re.search("RESOURCE_EXHAUSTED|out of memory", str(error)):
                raise
            del steps[column]
            notes.append(f"{column} is left out of {name}: out of memory")


def case(network: Network) -> Any:
    """The case of a network, which builds a `Step` for each column."""
    arrays = model_steps.weights(network)
    torch = TORCH_COMPILED if jax.default_backend() == "gpu" else TORCH_EAGER
    makers = {TORCH_COMPILED: (), TORCH_EAGER: (), SCAN_STACK: ("language_model",)}
    makers[torch] = ("language_model", "resnet")

    def built(column: str) -> Any:
        # Each step donates its state.
        return COLUMNS[column](network, [jnp.copy(array) for array in arrays])

    builders = {
        column: functools.partial(built, column)
        for column in COLUMNS
        if network.maker in makers.get(column, model_steps.BY_MAKER)
    }
    return Case(network.name, builders, baseline=NNX)


def tolerance(network: Network) -> float:
    """The largest relative difference allowed between the losses of columns."""
    if network.dtype == "bfloat16":
        return 3e-2
    # By default, GPUs multiply float32 matrices with lower precision, and with various kernels.
    if jax.default_backend() != "cpu":
        return 1e-2
    return 1e-3 if network.maker == "resnet" else 1e-4


def check(steps: Any, tolerance: float = 1e-4, times: int = 3) -> None:
    """Raises `AssertionError` if the losses of several steps differ between columns."""
    losses = {column: [float(step.call()) for _ in range(times)] for column, step in steps.items()}
    for column, found in losses.items():
        expected = losses[BY_HAND]
        message = f"the losses of {column!r} differ from those {BY_HAND}"
        np.testing.assert_allclose(found, expected, rtol=tolerance, err_msg=message)


def _baseline(columns: Any) -> str:
    return NNX if NNX in columns else next(iter(columns))


# --- first steps, in fresh processes ---


def first_step(table: str, key: str) -> Row:
    """The row of one of the times that `time_first_step` prints."""

    def measured(options: argparse.Namespace) -> dict[str, Any]:
        found, notes = _in_processes(options.first_rounds)
        times = {column: [each[key] for each in results] for column, results in found.items()}
        times = of_seconds(times, _baseline(times))
        return report.row(model_steps.FIRST.name, times, notes, table)

    return Row(model_steps.FIRST.name, table, measured)


@functools.cache
def _in_processes(rounds: int) -> tuple[dict[str, list[Any]], list[str]]:
    """The output of the processes of each column, and notes on libraries that are not installed.

    The rounds are interleaved, after an untimed round that writes bytecode.
    """
    turns, notes = {}, []
    for column, library in LIBRARIES.items():
        if column in (BY_HAND, TORCH_EAGER, TORCH_COMPILED):
            continue
        if importlib.util.find_spec(library.partition(".")[0]) is None:
            notes.append(f"{column} is left out: No module named {library!r}")
        else:
            turns[column] = functools.partial(_in_process, TIMED.format(column))
    interleaved(turns, rounds=1)
    return interleaved(turns, rounds), notes


def _in_process(program: str) -> dict[str, float]:
    return in_process("-c", program, JAX_ENABLE_COMPILATION_CACHE="false")


def generating(batch: int) -> Row:
    """The row of text generation for a batch of prompts."""
    new_case = generation.case(batch)

    def measured(options: argparse.Namespace) -> dict[str, Any]:
        calls, notes = build(new_case)
        generation.check(calls)
        times = measure(calls, baseline=generation.BY_HAND, rounds=options.rounds)
        rates = per_second(batch * generation.NEW, times)
        return report.row(new_case.name, times, notes, GENERATION) | {"rates": rates}

    return Row(new_case.name, GENERATION, measured)


ROWS = tuple(map(step, model_steps.NETWORKS))
GENERATION_ROWS = tuple(generating(batch) for batch in (1, 16))
FIRST_ROWS = (first_step(FIRST_STEP, "first_s"), first_step(BUILDING, "build_s"))


def main(
    arguments: Sequence[str] | None = None,
    rows: Sequence[Row] = ROWS,
    first_rows: Sequence[Row] = FIRST_ROWS,
) -> int:
    """Measures and prints. Returns 2 for a wrong argument and 130 after Ctrl-C."""
    flags = {
        "first-steps": "also time the first step of fresh processes",
        "memory": "also measure the memory of fresh processes",
        "generate": "measure only text generation",
    }
    options = command.parse(arguments, NAME, __doc__, ROUNDS, FIRST_ROUNDS, flags=flags)

    among = [*rows, *(first_rows if options.first_steps else ())]
    among = list(GENERATION_ROWS) if options.generate else among
    among = [row for row in among if row.backend in (None, jax.default_backend())]
    method = {"rounds": options.rounds}
    if options.first_steps:
        method["first_rounds"] = options.first_rounds
    return command.execute(
        NAME,
        options,
        lambda: find(options.rows, among),
        lambda row: row.measured(options),
        method=method,
        tables=list(map(report.Table, dict.fromkeys(row.table for row in among))),
    )


if __name__ == "__main__":
    sys.exit(main())
