"""Runs all benchmarks, and the tests that need only one device, within a given time.

The commands run in separate processes, one after the other, the most important first. Each command
has a share of the remaining time. It runs in full if the share is long enough, and otherwise with
15 rounds. At the end of its share it is interrupted, and its finished rows are kept. The last
commands are skipped if there is less than a quarter of the time of each. Reports and a summary are
written to `benchmarks/results/`, which the site reads.
"""

import argparse
import dataclasses
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks import report
from benchmarks.table import markdown_table, text_table

NAME = "benchmarks.all"
ROOT = pathlib.Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"

GRACE_S = 20
"""The seconds that an interrupted command has to print its finished rows."""


@dataclasses.dataclass(frozen=True)
class Job:
    """A command.

    - `name`: the name of its module in `benchmarks`, or `TESTS`.
    - `full_minutes`: the time that it takes with its defaults, on two CPU cores.
    - `share`: its share of the time, relative to the other jobs.
    - `short`: its options if its share is less than `full_minutes`.
    """

    name: str
    full_minutes: float
    share: float
    short: tuple[str, ...] = ("--rounds", "15")


TESTS = "tests"
FIRST = ("--rounds", "15", "--first-rounds", "3")

JOBS = (
    Job("models", 8, 4),
    Job(TESTS, 8, 4),
    Job("training", 8, 3),
    Job("jit_overhead", 8, 3),
    Job("layers", 9, 3, FIRST),
    Job("loops", 4, 2),
    Job("jit_edges", 8, 2, FIRST),
    Job("ad_modes", 10, 2),
    Job("bayes_cost", 15, 3),
    Job("bayes_quality", 25, 3, ("--quick",)),
    Job("exactness", 10, 2, ("--quick",)),
    Job("export", 5, 1),
    Job("downstream", 10, 1),
)
"""The jobs, in order of importance."""

TESTED = [
    "transforms",
    "nn",
    "partition",
    "module",
    "pytree",
    "loops",
    "train",
    "ad",
    "bayes",
    "ship",
    "internal",
    "debug",
]
"""The folders of tests that use the device."""

SEVERAL_DEVICES = [
    "transforms/sharding",
    "train/sharding",
    "transforms/jit/test_shardings.py",
    "transforms/mapping/test_pmap.py",
    "transforms/mapping/test_shard_map.py",
    "loops/test_sharded.py",
]
NOT_ON_ONE_GPU = [
    "pytree/test_leaf_format.py::test_sharded_array_is_read_into_the_same_shards",
    "pytree/test_leaf_format.py::test_array_on_a_device_is_read_to_that_device",
    "transforms/checks/test_error_if.py::test_check_on_several_devices_raises_on_all_devices",
    "transforms/checks/test_error_if.py::"
    "test_check_of_an_array_without_known_device_raises_on_all_devices",
    "transforms/mapping/test_errors.py::test_error_names_the_axis_argument_or_option_and_its_path",
    "transforms/test_references.py::test_reference_among_arguments_keeps_its_sharding",
    "transforms/jit/test_arrays.py::test_array_of_every_kind_gives_the_output_of_jax_jit",
    "nn/test_batch_norm.py::test_statistics_over_devices_equal_statistics_of_the_whole_batch",
    "nn/test_batch_norm.py::test_statistics_inside_shard_map_equal_statistics_of_the_whole_batch",
    "nn/test_cross_entropy.py::test_tokens_and_classes_may_be_sharded",
    "nn/test_dot_product_attention.py::test_sharded_arrays_and_shard_map_agree",
    "nn/test_dot_product_attention.py::test_shard_map_sums_the_gradients_of_shared_arrays",
    "nn/test_init.py::test_arrays_of_many_shapes_are_drawn_by_few_programs",
    "nn/test_norm.py::test_gradient_of_residual_blocks_computes_each_sum_once",
    "ad/test_modes.py::test_devices_that_share_an_array_share_its_gradient",
    "loops/test_carry.py::test_gradient_of_an_array_that_devices_share_is_shared",
    "train/test_state.py::test_committed_arrays_stay_and_uncommitted_arrays_may_be_moved",
    "train/test_batches.py::test_arrays_are_placed_explicitly_in_the_context_of_the_caller",
    "train/test_batches.py::test_existing_batches_need_a_thread_only_for_placement",
    "train/test_batches.py::test_arrays_are_moved_to_the_sharding_and_other_leaves_are_unchanged",
    "train/checkpoints/test_save_restore.py::test_arrays_take_the_sharding_of_like",
    "debug/test_retraces.py::test_difference_of_sharding_names_the_axes_of_the_mesh",
    "debug/test_dce.py::test_store_dce_keeps_weak_types_and_shardings",
    "ship/test_transfers.py::test_explicit_allows_explicit_copies_and_numbers_of_a_program",
]
"""Tests that need several devices (the suite divides the CPU in two), and a test of XLA's
instructions for CPUs.
"""

# The suite's tolerances are for float32. A GPU multiplies matrices in TensorFloat32 by default.
# The worker processes share one device, so none may preallocate its memory. Autotuning is disabled,
# because each program runs once. PYTHONPATH is for tests that start a process in another folder.
TEST_ENVIRONMENT = {
    "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
    "JAX_DEFAULT_MATMUL_PRECISION": "highest",
    "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
    "XLA_FLAGS": "--xla_backend_optimization_level=3 --xla_gpu_autotune_level=0",
}

# A shell makes its background processes ignore SIGINT.
INTERRUPTED = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.SIG_DFL)
os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
"""

MACHINE = "import json; from benchmarks import report; print(json.dumps(report.new_report({})))"


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs all commands. Returns 1 if a command failed and 2 for a wrong argument."""
    options = _parse(arguments)
    try:
        result = new_report(options.device)
    except ValueError as error:
        print(f"{NAME}: {error}", file=sys.stderr)
        return 2
    result["method"]["minutes"] = options.minutes
    version = result["machine"]["jax"]
    options.out.mkdir(parents=True, exist_ok=True)

    def path(name: str) -> pathlib.Path:
        stem = {"ad_modes": "ad-modes"}.get(name, name.replace("bayes_", "bayes-"))
        return options.out / f"{stem}-{options.device}-jax-{version}.json"

    wanted = [job for job in JOBS if re.search(options.only, job.name)]
    jobs = in_time(wanted, options.minutes)
    if left_out := [job.name for job in wanted[len(jobs) :]]:
        print(f"skipped for lack of time: {', '.join(left_out)}", flush=True)
    deadline_s = time.monotonic() + 60 * options.minutes
    for number, job in enumerate(jobs):
        left_s = deadline_s - time.monotonic() - GRACE_S
        if left_s <= 0:
            break
        share_s = left_s * job.share / sum(each.share for each in jobs[number:])
        result["rows"].append(run(job, share_s, path(job.name), options.device))
        is_whole = all(row["status"] == "finished" for row in result["rows"])
        result["is_complete"] = is_whole and number == len(wanted) - 1
        report.write(result, path("all"))
    print(render(result))
    return int(any(row["status"] == "failed" for row in result["rows"]))


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog=f"python -m {NAME}",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--device", choices=("cpu", "gpu", "tpu"), default="cpu", help="default cpu")
    add("--minutes", type=float, default=120.0, metavar="N", help="default 120")
    add("--only", default="", metavar="REGEX", help="only commands whose name matches")
    add("--out", type=pathlib.Path, default=RESULTS, metavar="DIR", help="the folder for reports")
    options = parser.parse_args(arguments)
    if not 0 < options.minutes < 1e5:
        parser.error(f"argument --minutes: expected a positive number, got {options.minutes}")
    if not any(re.search(options.only, job.name) for job in JOBS):
        parser.error(f"argument --only: {options.only!r} finds none of {[j.name for j in JOBS]}")
    return options


def new_report(device: str) -> dict[str, Any]:
    """A report without rows. A subprocess makes it, because this process must not use the device.

    **Raises:** `ValueError` if JAX runs on another device.
    """
    if device == "cpu":
        os.environ["JAX_PLATFORMS"] = "cpu"
    made = subprocess.run([sys.executable, "-c", MACHINE], cwd=ROOT, capture_output=True, text=True)
    if made.returncode:
        raise ValueError(f"JAX does not start:\n{made.stderr}")
    found = json.loads(made.stdout)
    if (backend := found["machine"]["backend"]) != device:
        raise ValueError(f"argument --device: JAX runs on {backend} here, not on {device}")
    return found


def in_time(jobs: Sequence[Job], minutes: float) -> Sequence[Job]:
    """The first jobs, as many as can have a quarter of their time each."""
    shares = sum(job.share for job in jobs)
    if len(jobs) <= 1 or all(4 * minutes * j.share / shares >= j.full_minutes for j in jobs):
        return jobs
    return in_time(jobs[:-1], minutes)


def run(job: Job, share_s: float, path: pathlib.Path, device: str) -> dict[str, Any]:
    """Runs a job for at most `share_s` seconds and returns its row of the summary."""
    is_short = share_s < 60 * job.full_minutes
    if job.name == TESTS:
        command = ["-m", "pytest", "-q", "-n", "auto", "--maxprocesses", "14", "--dist", "loadfile"]
        # This plugin warns about xdist, and warnings are errors.
        command += ["-p", "no:benchmark", *(f"tests/{folder}" for folder in TESTED)]
        if device != "cpu":
            command += [f"--ignore=tests/{each}" for each in SEVERAL_DEVICES]
            command += [f"--deselect=tests/{each}" for each in NOT_ON_ONE_GPU]
        environment = os.environ | TEST_ENVIRONMENT
    else:
        command = ["-m", f"benchmarks.{job.name}", "--json", str(path)]
        command += job.short if is_short else ()
        environment = os.environ | {}
    print(f"{job.name}, at most {share_s / 60:.1f} minutes: {' '.join(command)}", flush=True)
    start_s = time.monotonic()
    with tempfile.TemporaryFile("w+") as output:
        status = _execute(command, share_s, environment, output)
        output.seek(0)
        text = output.read()
    print(text, flush=True)
    row = {
        "name": job.name,
        "seconds": round(time.monotonic() - start_s, 1),
        "status": status,
        "is_short": is_short,
    }
    if job.name == TESTS:
        return row | tests_in(text)
    row["rows"] = len(json.loads(path.read_text())["rows"]) if path.exists() else 0
    if not row["rows"]:
        path.unlink(missing_ok=True)
    return row


def _execute(
    command: Sequence[str], seconds: float, environment: Mapping[str, str], output: Any
) -> str:
    """Runs a command of this Python. Returns "finished", "cut" (its time is over) or "failed"."""
    started = [sys.executable, "-c", INTERRUPTED, *command]
    process = subprocess.Popen(started, cwd=ROOT, env=environment, stdout=output, stderr=output)
    try:
        return "failed" if process.wait(seconds) else "finished"
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGINT)
    try:
        process.wait(GRACE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    return "cut"


def tests_in(text: str) -> dict[str, Any]:
    """The numbers of passed and failed tests, and the failures, from the output of pytest."""
    counts = {
        what: int(found[-1]) if (found := re.findall(rf"(\d+) {what}", text)) else 0
        for what in ("passed", "failed", "error", "skipped")
    }
    return counts | {"failures": re.findall(r"^(?:FAILED|ERROR) (\S+)", text, re.MULTILINE)}


def render(result: Mapping[str, Any], *, markdown: bool = False) -> str:
    """The summary of a run as a table."""
    draw = markdown_table if markdown else text_table
    rows = [["", "seconds", "", "result"]]
    for row in result["rows"]:
        counted = ["rows"] if "rows" in row else ["passed", "failed", "error", "skipped"]
        found = ", ".join(f"{row[what]} {what}" for what in counted)
        status = row["status"] + (", short" if row["is_short"] else "")
        rows.append([row["name"], f"{row['seconds']:.0f}", status, found])
    failures = [f"- {name}" for row in result["rows"] for name in row.get("failures", ())]
    return "\n\n".join(filter(None, [draw(rows), "\n".join(failures)]))


if __name__ == "__main__":
    sys.exit(main())
