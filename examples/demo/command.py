"""Bayesian networks trained on real data, and the cost of a call by `filter_jit`."""

import argparse
import os
import pathlib
import sys
import tempfile
from collections.abc import Sequence
from typing import NoReturn

import jax

from . import pictures, report
from .compare import compare
from .evaluate import METHODS
from .training import SETTINGS, load, prepare, settings_for

STATUSES = {"finished": 0, "diverged": 1, "interrupted": 130}
"""The exit status for each way of stopping; a shell reports 128 + SIGINT after Ctrl-C."""

MOST = 2**31 - 1
"""The largest seed and number of steps, so that both fit in 32 bits."""


class _Parser(argparse.ArgumentParser):
    """An argument parser whose errors are one line, without the usage text."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the demo.

    **Arguments:**

    - `arguments`: the command-line arguments; by default `sys.argv[1:]`.

    **Returns:** the exit status: 0, 1 if a training diverged, or 130 after Ctrl-C.

    **Raises:** `SystemExit` with status 2 for wrong use.
    """
    parser = _Parser(prog="python -m examples.demo", description=__doc__)
    add = parser.add_argument
    add("--data", choices=[*SETTINGS, "both"], default="both", help="which data set (both)")
    add(
        "--method",
        choices=[*METHODS, "all"],
        action="append",
        default=[],
        help="also infer the posterior with this method of eqxlike.bayes; may be repeated",
    )
    add("--steps", type=int, metavar="N", help="training steps instead of each data set's own")
    add("--seed", type=int, default=0, metavar="N", help="seed of split, weights, noise (0)")
    out = "where pictures and results go (demo-results)"
    add("--out", type=_writable_folder, default="demo-results", metavar="DIR", help=out)
    add("--quick", action="store_true", help="a quick look; do not quote its times")
    device = "auto: a GPU where JAX sees one (auto)"
    add("--device", choices=("auto", "cpu", "gpu"), default="auto", help=device)
    options = parser.parse_args(arguments)
    for name, least in {"steps": 1, "seed": 0}.items():
        value = getattr(options, name)
        if value is not None and not least <= value <= MOST:
            wanted = f"an integer of at least {least} and at most {MOST}"
            parser.error(f"argument --{name}: must be {wanted}, got {value}")
    if options.quick:
        _compile_quickly()
    try:
        device = choose_device(options.device)
    except (RuntimeError, ValueError) as error:
        parser.error(" ".join(str(error).split()))
    try:
        return _run(options, device)
    except OSError as error:
        parser.error(f"cannot write the results: {error}")


def _run(options: argparse.Namespace, device: str) -> int:
    print(f"device: {device}", flush=True)
    names = list(SETTINGS) if options.data == "both" else [options.data]
    methods = list(METHODS) if "all" in options.method else list(dict.fromkeys(options.method))
    seed, stopped, reached = options.seed, "finished", {}
    try:
        for name in names:
            data = prepare(name, load(name), seed=seed)
            settings = settings_for(name, steps=options.steps, is_quick=options.quick)
            results = compare(data, settings, seed=seed, reached=reached, methods=methods)
            trainings = results["trainings"].values()
            if any(training["stopped"] == "diverged" for training in trainings):
                stopped = "diverged"
    except KeyboardInterrupt:
        stopped = "interrupted"
    about = {"stopped": stopped, "seed": seed, "quick": options.quick, "device": device}
    contents = report.plain(about | {"machine": report.machine(), "data": reached})
    report.print_tables(contents)
    files = report.write(contents, options.out) + pictures.draw(contents["data"], options.out)
    print("\nwritten: " + ", ".join(map(str, files)), flush=True)
    if stopped == "interrupted":
        print("interrupted: the results cover what was finished", file=sys.stderr)
    return STATUSES[stopped]


def _writable_folder(text: str) -> pathlib.Path:
    path = pathlib.Path(text)
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            return path
    except OSError as error:
        reason = f"cannot write to {text!r}: {error.strerror}"
        raise argparse.ArgumentTypeError(reason) from None


def _compile_quickly() -> None:
    """Disables LLVM's optimisations, unless the user has set a level.

    The optimisations take a third of the run time.

    The flags take effect because XLA reads them later, when JAX first looks for devices.
    """
    flags, level = os.environ.get("XLA_FLAGS", ""), "--xla_backend_optimization_level"
    if level not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} {level}=0"


def choose_device(choice: str) -> str:
    """Makes JAX use a type of device, and returns a description of the device.

    "auto" is JAX's default: a GPU if there is one.

    **Raises:** `RuntimeError` if JAX has no such device.
    """
    if choice == "cpu":
        jax.config.update("jax_platforms", "cpu")
    device = jax.devices(None if choice == "auto" else choice)[0]
    kind = device.device_kind
    return device.platform if kind == device.platform else f"{device.platform} ({kind})"
